"""Commands that send, print and measure records."""

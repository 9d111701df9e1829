"""One suite per port, over every implementation."""

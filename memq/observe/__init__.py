"""Names and kinds of memq's metrics and spans."""

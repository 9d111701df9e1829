"""Names and kinds of what memq shows of itself: metrics and spans."""

"""The processes that the rows measure or use to measure: each gets commands as lines of JSON on its stdin."""

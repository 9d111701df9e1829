"""The processes that the rows measure or measure with: each is told what to do by lines of JSON on its stdin."""

"""Runs of queue items: the blocks behind the first ones of a long lane lie in objects of the store."""

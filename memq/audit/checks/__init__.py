"""Batches and objects compared with the pointers that name them."""

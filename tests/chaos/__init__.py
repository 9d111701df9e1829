"""Chaos: real processes killed, paused, cut off and filled up by a plan, and a judge that uses nothing of memq.

`make chaos MINUTES=60 SEED=7` draws the plan (`plan`), starts the servers (`stack`) behind links that fail (`links`),
runs clients as processes that keep journals (`workers`, `journal`), and judges what is left in the store (`judge`).
"""

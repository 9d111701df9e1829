"""Brings units of held records from their service partition into the logs of their targets."""

"""Retention and sweep: delete old pointers and unnamed objects, with proof that they may be deleted."""

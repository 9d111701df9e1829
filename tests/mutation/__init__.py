"""Mutation: small faults planted into the product, one at a time, to measure how many of them the tests find."""

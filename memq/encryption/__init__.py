"""Encryption of content by clients: key providers, envelopes of blocks, and keys of subjects."""

"""Sockets, slabs, intake, streams, limits: received bytes become sound blocks."""

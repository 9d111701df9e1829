"""Requests of clients and operators to a broker: frames and HTTP."""

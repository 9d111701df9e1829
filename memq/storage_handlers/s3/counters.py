"""Counters of the S3 store as plain integers, read by the owner of a registry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class S3Counters:
    """Every field is a metric of the same name, after `memq_store_`, in `memq.observe.metrics`."""

    requests: int = 0
    put_requests: int = 0
    get_requests: int = 0
    retries: int = 0
    slow_downs: int = 0
    timeouts: int = 0
    damaged: int = 0
    hedges: int = 0
    hedges_won: int = 0
    lost_answers: int = 0
    breaker_openings: int = 0

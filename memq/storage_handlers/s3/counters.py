"""What the S3 store counts, as plain integers; whoever has a registry of metrics reads them from here."""

from __future__ import annotations

from dataclasses import dataclass, field


def _counter(doc: str) -> int:
    return field(default=0, metadata={"doc": doc})


@dataclass(slots=True)
class S3Counters:
    """Every field is a counter, its meaning in the metadata `doc`."""

    requests: int = _counter("requests sent to the store, of any kind, hedges and tries included")
    put_requests: int = _counter("requests that send an object or a part of one")
    get_requests: int = _counter("requests that read an object or a part of one")
    retries: int = _counter("requests that were sent again after a failure")
    slow_downs: int = _counter("answers by which the store asked for less")
    timeouts: int = _counter("requests that were given up for their time")
    damaged: int = _counter("bodies that did not fit their checksum, on either way")
    hedges: int = _counter("second requests sent because the first was slow")
    hedges_won: int = _counter("second requests that came back first")
    lost_answers: int = _counter("puts that turned out to be done though their answer was lost")
    breaker_openings: int = _counter("times that the circuit breaker opened")

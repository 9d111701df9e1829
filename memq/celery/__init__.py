"""Celery on leased queues, by a transport of kombu; `import memq.celery` makes `memq://` known."""

from __future__ import annotations

from kombu.transport import TRANSPORT_ALIASES

SCHEME = "memq"

TRANSPORT_ALIASES[SCHEME] = "memq.celery.transport:Transport"

"""memq as a broker of Celery: `import memq.celery` registers `memq://` as a transport of kombu."""

from __future__ import annotations

from kombu.transport import TRANSPORT_ALIASES

SCHEME = "memq"

TRANSPORT_ALIASES[SCHEME] = "memq.celery.transport:Transport"

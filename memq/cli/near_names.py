"""The nearest name of a topic or group, for the hint of an error about one that does not exist."""

from __future__ import annotations

import difflib
import re
from contextlib import suppress

from memq.client.admin import Admin
from memq.errors import MemqError, NotFoundError

LOOK_UP_MS = 2_000
_MISSING = re.compile(r"(topic|group) '([^']+)' does not exist\Z")


def name_nearest(error: NotFoundError, brokers: str) -> None:
    """Put the nearest name into the hint, if the cluster has one that is near enough."""
    found = _MISSING.match(str(error))
    if found is None:
        return
    kind, name = found.groups()
    with suppress(MemqError), Admin(brokers, connect_timeout_ms=LOOK_UP_MS) as admin:
        names = [topic.name for topic in admin.topics()] if kind == "topic" else admin.groups()
        for near in difflib.get_close_matches(name, names, n=1, cutoff=0.6):
            error.hint = f"did you mean '{near}'? memq {kind} list shows the {kind}s"

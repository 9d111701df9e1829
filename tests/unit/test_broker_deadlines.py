"""Connections that a broker closes after a timeout: no HELLO, an incomplete frame, unread answers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.broker.broker import _close_overdue
from memq.errors import MemqError
from memq.settings import BrokerSettings

SETTINGS = BrokerSettings(hello_timeout_ms=10_000, frame_timeout_ms=30_000)
NOW_S = 1_000.0


class Peer:
    """A connection as the deadlines see it; `said` is what becomes of it."""

    def __init__(self, **fields: Any) -> None:
        self.said: list[str] = []
        self.ready = True
        self.opened_s = 0.0
        self.half_since_s: float | None = None
        self.leaving_since_s: float | None = None
        self.token_ends_s = math.inf
        self.paused = False
        self.unread = False
        self.outbox = SimpleNamespace(note_progress=self._check_time, is_stuck=self._is_stuck)
        vars(self).update(fields)

    def _check_time(self, now_s: float) -> None:
        assert now_s == NOW_S

    def _is_stuck(self, now_s: float, timeout_ms: int) -> bool:
        assert (now_s, timeout_ms) == (NOW_S, SETTINGS.frame_timeout_ms)
        return self.unread

    def refuse(self, error: MemqError) -> None:
        """Tell it why, and close."""
        self.said.append(str(error))

    def abort(self) -> None:
        """Close at once."""
        self.said.append("abort")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, []),
        ({"ready": False, "opened_s": NOW_S - 9}, []),
        ({"ready": False, "opened_s": NOW_S - 10}, []),
        ({"ready": False, "opened_s": NOW_S - 11}, ["no HELLO within 10000 ms"]),
        ({"half_since_s": NOW_S - 29}, []),
        ({"half_since_s": NOW_S - 30}, []),
        ({"half_since_s": NOW_S - 31}, ["a frame was not complete within 30000 ms"]),
        ({"half_since_s": NOW_S - 31, "paused": True}, []),
        ({"unread": True}, ["abort"]),
        ({"leaving_since_s": NOW_S - 29}, []),
        ({"leaving_since_s": NOW_S - 30}, []),
        ({"leaving_since_s": NOW_S - 31}, ["abort"]),
        ({"token_ends_s": NOW_S + 1}, []),
        ({"token_ends_s": NOW_S}, ["the token of this connection has ended"]),
    ],
)
def test_a_connection_is_closed_when_its_time_is_over(fields: dict[str, Any], said: list[str]) -> None:
    peer = Peer(**fields)
    _close_overdue(cast(Any, peer), NOW_S, SETTINGS)
    assert peer.said == said

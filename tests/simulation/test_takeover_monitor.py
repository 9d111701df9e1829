"""The rules of early takeovers that each simulated run is checked against, each broken once."""

from __future__ import annotations

import pytest

from memq.governor import TAKEOVER_INTERVAL_MS, BrokerEntry
from memq.simulation.ports.takeover_monitor import REFUSED_S_MAX, TakeoverMonitor

SUSPECT = BrokerEntry(id="b", session="s", address="b:1", host="b")


@pytest.mark.parametrize(
    ("refused_by", "refused_s", "second_ms", "found"),
    [
        ("a", 0.0, TAKEOVER_INTERVAL_MS, ""),
        ("c", 0.0, TAKEOVER_INTERVAL_MS, "early takeover of 'b' by 'a', whose connection it did not refuse"),
        (
            "a",
            -REFUSED_S_MAX - 1,
            TAKEOVER_INTERVAL_MS,
            "early takeover of 'b' by 'a', whose connection it did not refuse",
        ),
        ("a", 0.0, TAKEOVER_INTERVAL_MS - 1, "early takeover of 'b' by 'a', 59999 ms after the last one"),
    ],
)
def test_a_takeover_follows_a_refusal_and_repeats_after_its_rest(
    refused_by: str, refused_s: float, second_ms: int, found: str
) -> None:
    findings: list[str] = []
    monitor = TakeoverMonitor(findings.append)
    monitor.refused(refused_by, ("b", 1), refused_s)
    for now_ms in (0, second_ms):
        monitor.taken_over("a", SUSPECT, now_ms, 0.0)
    assert findings[:1] == ([found] if found else [])

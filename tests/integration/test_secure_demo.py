"""The demo of TLS, identities and permissions on a part of its records: real servers and twelve attacks."""

from __future__ import annotations

from pathlib import Path

from tests.demos import run_demo

TIMEOUT_S = 180.0


def test_every_attack_of_the_secure_demo_fails(tmp_path: Path) -> None:
    printed = run_demo("secure_demo", tmp_path, 5_000, TIMEOUT_S)
    assert "compared: all 5,000 records are equal" in printed
    assert "12 of 12 attacks failed and were logged; mallory sees 0 topics" in printed
    assert "the writer was stopped" in printed
    assert printed.count("  logged: ") == 12
    assert "NOTHING" not in printed

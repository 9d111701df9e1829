"""Keeps unit tests small: a test that starts a broker or a process belongs to `tests/component`."""

from __future__ import annotations

import subprocess

import pytest

from memq.broker.broker import Broker


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test that starts a broker or a process."""

    def refuse(self: object, *_: object, **__: object) -> None:
        pytest.fail(f"{type(self).__name__} starts in a unit test: move the test to tests/component")

    monkeypatch.setattr(Broker, "__init__", refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)

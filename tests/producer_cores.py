"""The core of a producer for tests: the buffer that the public class fills, and the senders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from memq.client.producer import producer
from memq.client.producer.core import ProducerCore


class RecordingCore(ProducerCore):
    """A core; the last one that was made is noted."""

    last: ProducerCore

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        RecordingCore.last = self


def note_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note the cores of asyncio producers from now on."""
    monkeypatch.setattr(producer, "ProducerCore", RecordingCore)


@contextmanager
def noted_cores() -> Iterator[None]:
    """Note the cores of asyncio producers in the block."""
    with pytest.MonkeyPatch.context() as patched:
        note_cores(patched)
        yield

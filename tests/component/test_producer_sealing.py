"""Blocks compressed on threads: all are sent, in order, and the threads end with the producer."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from random import Random

import pytest

import memq
from memq.client.producer import background
from memq.limits import KIB
from memq.runtime.threads import SpareThreads
from memq.testing import Cluster

RECORDS, RECORD_BYTES = 6_000, 1 * KIB


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


def sealing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("memq-seal")]


def values() -> list[bytes]:
    draw = Random(5)
    return [b"%d " % number + draw.randbytes(RECORD_BYTES) for number in range(RECORDS)]


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_records_compressed_in_other_threads_keep_their_order(codec: str) -> None:
    sent = values()
    with Cluster() as cluster:
        with memq.Producer(cluster.address, codec=codec, block_bytes=128 * KIB) as producer:
            for value in sent:
                producer.send("clicks", value)
            assert sealing(), "a full block goes to another thread"
        assert not sealing(), "a close waits for these threads"
        assert [record.value for record in cluster.records("clicks")] == sent


@pytest.mark.parametrize(
    ("cores", "codec", "expected"), [(None, "zstd", 0), (1, "lz4", 0), (2, "zstd", 1), (16, "zstd", 3), (16, "none", 0)]
)
def test_there_is_a_thread_for_each_core_but_the_callers_up_to_four(
    cores: int | None, codec: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, int]] = []

    class Counted(SpareThreads):
        def __init__(self, name: str, threads_max: int) -> None:
            found.append((name, threads_max))
            super().__init__(name, threads_max)

    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(background, "SpareThreads", Counted)
    memq.Producer("127.0.0.1:1", codec=codec).close()
    assert found == [("seal", expected)]


def test_without_a_codec_and_with_small_blocks_there_is_no_thread() -> None:
    with Cluster() as cluster:
        with memq.Producer(cluster.address, codec="none", block_bytes=128 * KIB) as producer:
            producer.send_many("clicks", values())
        with memq.Producer(cluster.address, block_bytes=32 * KIB) as producer:
            producer.send_many("clicks", values())
        assert not sealing()


def test_a_forgotten_producer_takes_its_threads_with_it() -> None:
    with Cluster() as cluster:
        producer = memq.Producer(cluster.address, block_bytes=128 * KIB)
        producer.send_many("clicks", values())
        threads = sealing()
        assert threads
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del producer
            gc.collect()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert len(cluster.records("clicks")) == RECORDS

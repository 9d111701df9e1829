"""A forwarder with more blocks than may be under way at once: what it learns between two groups."""

from __future__ import annotations

import pytest

from memq.broker.spool import forwarding
from memq.broker.spool.forwarding import UNREAD_S_MAX
from tests.skipping_loop import run_skipping, skip
from tests.unit.forwarder_bench import Bench


def test_a_block_waits_whose_sequences_an_unreadable_object_gets_while_others_are_forwarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next owner may have forgotten the copy in that object by the time it can be read."""
    monkeypatch.setattr(forwarding, "IN_FLIGHT_BLOCKS_MAX", 1)

    async def work() -> None:
        bench = Bench(count=2)

        async def take(number: int, data: bytes) -> None:
            assert data == bench.blocks[0]
            await bench.land(bench.blocks[1])
            hidden.update(bench.store.objects)
            bench.store.objects.clear()
            await bench.land(data)

        hidden: dict[str, bytes] = {}
        bench.owner.take = take
        await bench.start()
        await skip(UNREAD_S_MAX / 2)
        assert (len(bench.owner.asked), len(bench.forwarder)) == (1, 1)
        bench.store.objects.update(hidden)
        await bench.forwarder.drain()
        assert (len(bench.owner.asked), bench.counters.given_up_blocks) == (1, 0)

    run_skipping(work())

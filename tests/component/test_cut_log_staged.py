"""A log is cut after the commit of a staged batch: the sweep keeps what may be the only copy of its records."""

from __future__ import annotations

from memq.broker.sweep.sweep import Sweep
from memq.format.key import manifest_key
from memq.notification.memory import MemoryQueue
from memq.topic import read_partitions
from tests.brokers import run
from tests.component.staged_rig import WRITER, Rig, rigged


def test_the_sweep_keeps_a_committed_batch_whose_pointer_a_cut_log_lost() -> None:
    """Its commit has returned, and its object is the only copy of its records; the other one was never committed."""

    async def work(rig: Rig) -> None:
        committed, never = await rig.staged([b"a"]), await rig.staged([b"b"])
        await rig.commits.commit(0, committed, rig.store)
        services = rig.broker.services
        assert isinstance(services.queue, MemoryQueue)
        (read,) = read_partitions(rig.topic)
        services.queue.log(read).entries.pop()
        parts = ("memq", rig.store, services.queue, services.coordinator, services.runtime.clock)
        kept, gone = sorted([committed[0].key, manifest_key("memq", WRITER, 0)]), [never[0].key]
        for goes in (False, True):
            swept = [each async for each in Sweep(*parts, print, 0).run(3_600_000, -60_000)]
            assert sorted(each.key for each in swept if each.kept) == kept
            assert [(each.key, each.goes) for each in swept if not each.kept] == [(key, goes) for key in gone]
        services.queue.log(read).begin = 1  # retention has removed the pointers of that time
        del services.queue.log(read).entries[:1]
        await rig.commits.commit(1, await rig.staged([b"c"]), rig.store)
        swept = [each async for each in Sweep(*parts, print, 0).find(3_600_000, -3_600_000)]
        assert not any(each.kept for each in swept)

    run(rigged(work, partitions=1))

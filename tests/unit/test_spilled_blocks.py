"""Blocks of queue items in runs: which of them move, what is known of them, and the order of grants."""

from __future__ import annotations

import pytest

from memq.errors import CorruptDataError
from memq.format.state_log.queue_run import QUEUE_ROWS, QueueRunEntry
from memq.format.state_log.run import NamedRun, RunPlace, RunWriter
from memq.queues.decisions import (
    RUNS_VERSION,
    CancelDecision,
    Dedupe,
    ItemOutcome,
    ItemRanges,
    ItemTerms,
    NackDecision,
    encode_decision,
)
from memq.queues.machine import QueueMachine
from memq.queues.runs.spilled import BringBlocksDecision, BroughtBlock, QueueLane, SpillBlocksDecision, bytes_of
from memq.queues.scheduler import ItemScheduler
from memq.queues.snapshots import decode_state
from tests.unit.queue_shard import PLAIN, Shard

LANE = QueueLane("jobs", "", 5)
FIRST = PLAIN._replace(priority=1)


def entries(shard: Shard, *blocks: int) -> list[QueueRunEntry]:
    """Return blocks as a run has them."""
    known = (shard.machine.blocks[each] for each in blocks)
    found = [QueueRunEntry(each.block, each.target, each.key, each.lane, each.arrival) for each in known]
    return sorted(found, key=lambda each: each.place)


def named(run: list[QueueRunEntry], key: str) -> NamedRun:
    writer = RunWriter(QUEUE_ROWS)
    writer.add(run)
    return writer.finish(key, 0, 0)[0]


def spill(shard: Shard, run: list[QueueRunEntry], key: str = "run", lane: QueueLane = LANE) -> object:
    """Name a run."""
    decision = SpillBlocksDecision(named(run, key), lane, bytes_of(each.block.id.producer for each in run))
    answer = shard.machine.apply(encode_decision(decision))
    shard.scheduler.spilled(lane.queue)
    return answer


def bring(shard: Shard, run: list[QueueRunEntry], count: int, key: str = "run", before: RunPlace = (0, 0, 0)) -> object:
    """Bring the first blocks of a run that is at `before`."""
    left = [each for each in run if each.place > before]
    chosen, head = left[:count], left[min(count, len(left) - 1)].place
    return shard.machine.apply(encode_decision(brought(chosen, key, before, chosen[-1].place, head)))


def brought(
    chosen: list[QueueRunEntry], key: str, before: RunPlace, to: RunPlace, head: RunPlace
) -> BringBlocksDecision:
    blocks = tuple(BroughtBlock(each.arrival, each.key, each.lane, each.block) for each in chosen)
    return BringBlocksDecision(key, before, to, head, blocks)


def of(count: int, terms: ItemTerms = PLAIN) -> Shard:
    """Return a shard with the blocks 1 to `count` of two items each."""
    shard = Shard()
    for block in range(1, count + 1):
        shard.enqueue(block, count=2, terms=terms)
    return shard


def blocks_of(items: list[tuple[int, int]]) -> list[int]:
    return list(dict.fromkeys(block for block, _ in items))


def test_blocks_in_runs_are_not_in_memory_but_known_and_counted() -> None:
    shard = of(4)
    assert spill(shard, entries(shard, 2, 3, 4)) is True
    machine = shard.machine
    assert (set(machine.blocks), machine.items, machine.topics, machine.objects) == ({1}, 8, {"jobs": 8}, {"key": 1})
    assert machine.is_known(3)
    shard.enqueue(3, count=2)
    assert (set(machine.blocks), machine.items, len(machine.spilled)) == ({1}, 8, 3)


def test_a_snapshot_has_the_ids_of_the_blocks_in_runs_alone() -> None:
    shard = of(4)
    run = entries(shard, 2, 3, 4)
    spill(shard, run)
    bring(shard, run, 1)
    state = shard.machine.snapshot()
    saved, again = decode_state(state), QueueMachine()
    assert (saved.version, len(saved.ranged), [each.items for each in saved.runs]) == (RUNS_VERSION, 2, [4])
    again.restore(state)
    assert again.snapshot() == state
    assert (again.items, again.topics, again.objects) == (8, {"jobs": 8}, shard.machine.objects)
    assert (again.is_known(4), again.is_known(5)) == (True, False)


def test_a_state_without_runs_is_as_earlier_releases_read_it() -> None:
    shard = of(2)
    run = entries(shard, 2)
    spill(shard, run)
    bring(shard, run, 1)
    assert decode_state(shard.machine.snapshot()).version == RUNS_VERSION - 1


@pytest.mark.parametrize("change", ["grant", "cancel", "given back", "again"])
def test_a_block_that_changes_before_its_run_is_named_stays_in_memory(change: str) -> None:
    shard = of(2)
    run = entries(shard, 1, 2)
    if change == "cancel":
        shard.settle(CancelDecision(1, (ItemRanges(1, (0, 1)),)))
    elif change == "again":
        shard.enqueue(1, count=2)
    else:
        shard.dequeue(1)
    if change == "given back":
        shard.change(NackDecision(shard.now.wall_ms, b"", shard.lease(1)))
    assert spill(shard, run) is True
    assert set(shard.machine.blocks) == {1}
    assert bring(shard, run, 2) is True
    assert (set(shard.machine.blocks), len(shard.machine.spilled), shard.machine.spilled.runs) == ({1, 2}, 0, {})


@pytest.mark.parametrize(
    "terms",
    [
        PLAIN._replace(expires_ms=99_000),
        PLAIN._replace(key="a", ordered=True),
        PLAIN._replace(dedupe=Dedupe(b"d" * 16, 0, 99_000)),
        PLAIN._replace(priority=4),
    ],
    ids=["ttl", "ordered", "dedupe", "another lane"],
)
def test_blocks_with_an_order_or_an_end_of_their_own_stay_in_memory(terms: ItemTerms) -> None:
    shard = Shard()
    shard.enqueue(1, terms=terms)
    run = entries(shard, 1)
    lane = QueueLane("jobs", terms.key, 5)
    assert spill(shard, run, lane=lane) is False
    assert (set(shard.machine.blocks), shard.machine.spilled.runs) == ({1}, {})


def test_blocks_come_back_once_as_they_were() -> None:
    shard = of(3)
    whole = shard.machine.snapshot()
    run = entries(shard, 1, 2, 3)
    spill(shard, run)
    assert bring(shard, run, 2) is True
    assert bring(shard, run, 2) is False, "the run is at another place"
    assert bring(shard, run, 2, before=run[1].place) is True
    assert bring(shard, run, 2, before=run[1].place) is False
    assert shard.machine.snapshot() == whole


def test_a_block_that_a_request_names_comes_out_of_order() -> None:
    shard = of(3)
    run = entries(shard, 1, 2, 3)
    spill(shard, run)
    picked = brought(run[2:], "run", (0, 0, 0), (0, 0, 0), run[0].place)
    assert shard.machine.apply(encode_decision(picked)) is True
    assert shard.machine.apply(encode_decision(picked)) is True
    assert (set(shard.machine.blocks), shard.machine.items) == ({3}, 6), "the second one brings nothing"
    assert shard.settle(CancelDecision(1, (ItemRanges(3, (0, 2)),))) == (ItemOutcome.CANCELLED,) * 2
    assert bring(shard, run, 3) is True
    assert (set(shard.machine.blocks), shard.machine.items, shard.machine.spilled.runs) == ({1, 2}, 4, {})


def test_an_item_behind_a_due_block_in_a_run_is_not_granted() -> None:
    shard = of(4)
    run = entries(shard, 2, 3)
    spill(shard, run)
    assert shard.scheduler.is_ready(["jobs"], shard.now)
    assert blocks_of(shard.scheduler.peek("jobs", 10, shard.now)) == [1]
    assert blocks_of(shard.dequeue()) == [1]
    assert not shard.scheduler.is_ready(["jobs"], shard.now)
    assert (shard.dequeue(), shard.scheduler.peek("jobs", 10, shard.now)) == ([], [])
    bring(shard, run, 1)
    shard.scheduler.enqueued(2, shard.now)
    assert blocks_of(shard.dequeue()) == [2]
    bring(shard, run, 1, before=run[0].place)
    shard.scheduler.enqueued(3, shard.now)
    assert blocks_of(shard.dequeue()) == [3, 4]


def test_a_block_in_a_run_that_is_not_due_delays_no_other() -> None:
    shard = Shard()
    shard.enqueue(1, terms=FIRST, after_ms=5_000)
    shard.enqueue(2, after_ms=5_000)
    shard.enqueue(3)
    spill(shard, entries(shard, 1), "first", LANE._replace(priority=1))
    spill(shard, entries(shard, 2), "second")
    assert blocks_of(shard.dequeue()) == [3]
    shard.wait(5)
    shard.enqueue(4)
    assert shard.dequeue() == []


def test_other_keys_and_queues_do_not_wait_for_a_run() -> None:
    shard = Shard()
    shard.enqueue(1, terms=PLAIN._replace(key="a"))
    shard.enqueue(2, terms=PLAIN._replace(key="b"))
    shard.enqueue(3, topic="other")
    spill(shard, entries(shard, 1), lane=QueueLane("jobs", "a", 5))
    assert blocks_of(shard.dequeue()) == [2]
    assert blocks_of(shard.dequeue(topic="other")) == [3]


def test_a_block_of_a_lower_priority_number_comes_first_also_from_a_run() -> None:
    shard = Shard()
    shard.enqueue(1, terms=FIRST._replace(key="a"))
    shard.enqueue(2)
    run = entries(shard, 1)
    spill(shard, run, lane=QueueLane("jobs", "a", 1))
    assert shard.dequeue() == []
    shard.scheduler.unread.add("run")
    assert blocks_of(shard.dequeue()) == [2], "a run that can't be read delays no item"


def test_entries_of_blocks_that_have_left_the_memory_go() -> None:
    shard = of(300)
    for block in range(301, 601):
        shard.enqueue(block, count=2, after_ms=9_000)
    assert shard.scheduler.entries >= 600
    spill(shard, entries(shard, *range(2, 601)))
    assert shard.scheduler.entries < 10
    assert ItemScheduler(shard.machine, shard.now).entries < 10


def test_ids_of_a_wrong_length_are_refused() -> None:
    shard = of(1)
    decision = SpillBlocksDecision(named(entries(shard, 1), "run"), LANE, b"1234567")
    with pytest.raises(CorruptDataError, match="7 bytes are no ids"):
        shard.machine.apply(encode_decision(decision))

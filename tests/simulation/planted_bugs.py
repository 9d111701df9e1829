"""Planted bugs: one small change of the product's source each, which the simulation must find.

When the function, call or node that a bug names is gone, `plant` says so, and the bug must be planted again.
"""

from __future__ import annotations
import __future__ as future

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from memq.simulation.world.world import SimulationError
from tests.simulation.auditor_bugs import AUDITOR_BUGS
from tests.simulation.bug import Planted, before, body, first, instead, omit, swap
from tests.simulation.compaction_bugs import COMPACTION_BUGS
from tests.simulation.delay_bugs import DELAY_BUGS
from tests.simulation.durability_bugs import KEEPING_BUGS
from tests.simulation.filter_bugs import FILTER_BUGS
from tests.simulation.group_bugs import GROUP_BUGS
from tests.simulation.held_audit_bugs import HELD_AUDIT_BUGS
from tests.simulation.identity_bugs import IDENTITY_BUGS
from tests.simulation.liveness_bugs import LIVENESS_BUGS
from tests.simulation.ownership_bugs import OWNERSHIP_BUGS
from tests.simulation.part_bugs import PART_BUGS
from tests.simulation.plan import Plan, draw_plan, with_quick_failover
from tests.simulation.pop_bugs import POP_BUGS
from tests.simulation.queue_bugs import QUEUE_BUGS
from tests.simulation.retry_bugs import RETRY_BUGS
from tests.simulation.rules_bugs import RULES_BUGS
from tests.simulation.scenario import run_plan
from tests.simulation.topic_bugs import TOPIC_BUGS
from tests.simulation.transaction_bugs import TRANSACTION_BUGS

BUGS = (
    Planted(
        "ack before upload",
        "memq.broker.partition.appender",
        "Appender.appended",
        first("if stream.acks == AckLevel.ALL: stream.sink.send_ack(stream, AckLevel.ALL, stream.expected, 1)"),
        level="calm",
    ),
    Planted(
        "ack before pointer",
        "memq.broker.partition.topic_processor",
        "TopicProcessor._publish_batch",
        before("publisher.publish", "self._ack(slot, own.epoch)"),
        level="calm",
    ),
    Planted(
        "pointer before object",
        "memq.broker.partition.topic_processor",
        "TopicProcessor._upload",
        instead(
            "store_object",
            "body = own_object(sealed)\n"
            "self.ring.stored(slot, self._now())\n"
            "self.pump()\n"
            "await self.services.store.put(body.key, body.buffers, body.checksum)\n"
            "return\n",
        ),
        level="calm",
    ),
    Planted(
        "pointers out of order",
        "memq.broker.partition.ring",
        "Ring.plan",
        swap(
            "head = self.batches[0] if self.batches else None",
            "done = [slot for slot in self.batches if slot.state is SlotState.STORED]\n"
            "head = done[0] if done else None\n"
            "if head: self.batches.remove(head); self.batches.appendleft(head)",
        ),
        level="calm",
        seed=1001,
    ),
    Planted(
        "dedup off",
        "memq.broker.partition.ownership",
        "Ownership.join",
        omit("producer.queued.add"),
        seed=1018,
    ),
    Planted(
        "nothing left out at publishing",
        "memq.broker.partition.known_blocks",
        "KnownBlocks.copies_in",
        body("return ()"),
        level="sleepy",
        quick_failover=True,
        seed=13,
    ),
    Planted(
        "buffer reused early",
        "memq.broker.ingest.slabs",
        "SlabPool.release",
        swap("slab.references -= 1", "slab.references -= 2 if slab.references > 1 else 1"),
        level="calm",
    ),
    Planted(
        "proof dated when its answer was read",
        "memq.broker.partition.publishing",
        "Publisher.publish",
        swap("own.prove(handed_over_s)", "own.prove(self._now())"),
        level="sleepy",
        quick_failover=True,
        seed=1003,
    ),
    Planted(
        "publish repeated without reading the tail",
        "memq.broker.partition.publishing",
        "Publisher.publish",
        swap("own.unread, tries = True, tries + 1", "tries = tries + 1"),
        seed=1002,
    ),
    Planted(
        "what moved overtakes what went before",
        "memq.client.producer.open_block",
        "PartitionBuffer.holds_back",
        swap("return any(gate.first <= sequence for gate in self.gates)", "return False"),
        level="breezy",
        seed=1007,
        aspects=("widen",),
    ),
    Planted(
        "an open block continues over a change of the map",
        "memq.client.producer.send_buffer",
        "SendBuffer._order_moved_slots",
        swap("(before, buffer)", "(buffer,)"),
        level="breezy",
        aspects=("widen",),
        seed=1149,
    ),
    Planted(
        "cumulative ack over a refused block",
        "memq.broker.ingest.connection",
        "Connection._append",
        instead("self._turn_away", "stream.expected = run.next"),
        seed=1023,
    ),
    Planted(
        "stale epoch accepted by its owner",
        "memq.broker.partition.ownership",
        "Ownership.meet",
        swap("pointer.epoch > self.epoch", "False"),
        level="sleepy",
        quick_failover=True,
    ),
    Planted(
        "stale epoch accepted by the queue",
        "memq.notification.memory",
        "MemoryQueue.publish",
        omit("check_epoch"),
        level="sleepy",
        seed=3000,
    ),
    Planted(
        "off-by-one seal",
        "memq.broker.partition.ring",
        "Ring.seal",
        before("self.batches.append", "slot.extents[1:] = slot.extents[1:-1]"),
        level="calm",
    ),
    Planted(
        "lost wake-up after a publish",
        "memq.broker.partition.topic_processor",
        "TopicProcessor._publish",
        omit("self.pump"),
        level="calm",
        seed=1005,
    ),
    Planted(
        "opened without reading the tail",
        "memq.broker.partition.opening",
        "_read_tail",
        swap("own.restart(start)", "own.restart(span.end)"),
        seed=1002,
    ),
    Planted(
        "epoch used again",
        "memq.broker.partition.opening",
        "claim_epoch",
        swap("max(current.epoch, seen) + 1", "max(current.epoch, seen, 1)"),
        seed=1002,
    ),
    Planted(
        "reader without dedup",
        "memq.notification.dedup_window",
        "DedupWindow.judge",
        swap("self._compare(source, first, next_)", "Novelty.NEW"),
        seed=1003,
    ),
    Planted(
        "reader without look-back",
        "memq.client.consumer.offset_resolver",
        "OffsetResolver.window_before",
        swap("start > span.begin", "False"),
        level="sleepy",
        seed=1003,
    ),
    Planted(
        "late batches never counted",
        "memq.broker.partition.ownership",
        "Ownership._count_met",
        omit("self._adopt"),
        seed=1003,
    ),
    Planted(
        "late batches counted again and again",
        "memq.broker.partition.ownership",
        "Ownership._count_own",
        swap("self.adopted = [entry for entry in self.adopted if entry not in listed]", "pass"),
        seed=1003,
    ),
    Planted(
        "opening without the batches that nobody counted",
        "memq.broker.partition.ownership",
        "Ownership.state",
        swap("self.tail.uncounted()", "()"),
        seed=1011,
    ),
    Planted(
        "last statement believed",
        "memq.format.totals",
        "TotalsFold.reach",
        swap("mine = self.totals", "self.totals = mine = stated"),
        seed=1019,
    ),
    Planted(
        "lag from too few pointers",
        "memq.format.totals",
        "TotalsFold.add",
        swap("self._run >= RUN", "self._run >= 0"),
        seed=1055,
    ),
    Planted(
        "a delivery at its bound passes over the block that did not fit",
        "memq.client.consumer.fetch.partition_cursor",
        "PartitionCursor._assemble",
        swap(
            "found.stop = piece.first\nbreak",
            "slot.judged += 1\nfound.stop = piece.first + piece.records\nbreak",
        ),
        level="calm",
        aspects=("thin",),
    ),
    *OWNERSHIP_BUGS,
    *KEEPING_BUGS,
    *COMPACTION_BUGS,
    *IDENTITY_BUGS,
    *LIVENESS_BUGS,
    *TOPIC_BUGS,
    *AUDITOR_BUGS,
    *FILTER_BUGS,
    *GROUP_BUGS,
    *RETRY_BUGS,
    *QUEUE_BUGS,
    *POP_BUGS,
    *RULES_BUGS,
    *TRANSACTION_BUGS,
    *PART_BUGS,
    *DELAY_BUGS,
    *HELD_AUDIT_BUGS,
)


def find(bug: Planted, seeds: Iterable[int]) -> tuple[int, str]:
    """Run seeds with the bug until one finds it; return how many it took and what was found, "" when nothing.

    A finding counts when the same seed finds nothing without the bug.
    """
    count = 0
    for seed in seeds:
        count += 1
        plan = draw_plan(seed, bug.level, bug.producers, bug.aspects)
        if bug.quick_failover:
            plan = with_quick_failover(plan)
        with plant(bug):
            found = finding(plan)
        if found and not finding(plan):
            return count, found
    return count, ""


def finding(plan: Plan) -> str:
    """Return what a run finds, "" for nothing."""
    try:
        run_plan(plan)
    except SimulationError as error:
        return str(error)
    return ""


@contextmanager
def plant(bug: Planted) -> Iterator[None]:
    """Change the product while the block runs."""
    module = importlib.import_module(bug.module)
    *path, name = bug.target.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    tree = ast.parse(textwrap.dedent(inspect.getsource(original)))
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef), f"{bug.target} is no function"
    try:
        bug.change(function)
    except AssertionError as error:
        raise AssertionError(f"{bug.name}: {error}: {bug.target}") from None
    changed = compile(ast.fix_missing_locations(tree), f"<{bug.name}>", "exec", flags=future.annotations.compiler_flag)
    made: dict[str, Any] = {}
    exec(changed, module.__dict__, made)
    setattr(owner, name, made[name])
    try:
        yield
    finally:
        setattr(owner, name, original)

"""Promises of the ownership model, checked at each ack and at the end of each schedule."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from tests.model.parts import Block, Producer

if TYPE_CHECKING:
    from tests.model.ownership import Model


class BrokenPromiseError(AssertionError):
    """A promise of memq does not hold."""


def check_ack(model: Model, producer: Producer, block: Block) -> None:
    """Check an ack when its producer hears it. Raises: BrokenPromiseError."""
    if producer.role.acks_one:
        if not block.acked_by:
            raise BrokenPromiseError(f"block {block} is acked with 1, and no broker took it")
    elif not any(block in entry.blocks for entry in model.log):
        raise BrokenPromiseError(f"block {block} is acked, and not in the queue")


def check(model: Model) -> None:
    """Check what readers see of the log, and what brokers have. Raises: BrokenPromiseError."""
    delivered: dict[tuple[int, int], Block] = {}  # the first of each key: readers take others for copies
    contents: dict[tuple[int, int], tuple[Block, ...]] = {}
    for entry in model.log:
        for block in entry.blocks:
            delivered.setdefault(block.key, block)
        if entry.kind == "data":
            before = contents.setdefault((entry.epoch, entry.batch), entry.blocks)
            if not set(entry.blocks) <= set(before) and not set(before) <= set(entry.blocks):
                raise BrokenPromiseError(f"batch {entry.batch} of epoch {entry.epoch} has two contents")
    for producer in model.producers:
        (_check_acked_with_1 if producer.role.acks_one else _check_acked_with_all)(model, producer, delivered)
    for start in range(1, len(model.log)):
        _check_resume(model, start)


def _check_acked_with_all(model: Model, producer: Producer, delivered: dict[tuple[int, int], Block]) -> None:
    """Check that what was acked with all is delivered, in the order of its source."""
    for block in producer.blocks:
        if block.state == "acked" and delivered.get(block.key) is not block:
            raise BrokenPromiseError(f"block {block} is acked, and lost")
    source = producer.role.source
    acked = [block for block in delivered.values() if block.source == source and block.state == "acked"]
    if any(first.sequence > second.sequence for first, second in pairwise(acked)):
        raise BrokenPromiseError(f"acked blocks are delivered in the order {acked}")


def _check_acked_with_1(model: Model, producer: Producer, delivered: dict[tuple[int, int], Block]) -> None:
    """Check that a broker which acked a block with 1 has it until the queue has it; a crash ends that without a spool.

    A ring may have a copy of it: from another broker, or from another connection.
    """
    for block in producer.blocks:
        for number, keeps in block.acked_by.items():
            ring = (other for batch in model.brokers[number].ring for other in batch.blocks)
            if keeps and not (block.key in delivered or block in model.forwarders[number].held or block in ring):
                raise BrokenPromiseError(f"block {block} is acked with 1 by broker {number}, and lost")


def _check_resume(model: Model, start: int) -> None:
    """Check that a reader which starts there, and looks back by W, delivers nothing a second time."""
    log = model.log
    since = log[start - 1].time - model.rules.window_ticks
    first = next(place for place, entry in enumerate(log[:start]) if entry.time >= since)
    known = {block.key for entry in log[first:start] for block in entry.blocks}
    before = {block.key for entry in log[:start] for block in entry.blocks}
    for entry in log[start:]:
        keys = {block.key for block in entry.blocks}
        again = (before - known) & keys
        if again:
            raise BrokenPromiseError(f"block {again.pop()} is delivered again by a reader that starts at {start}")
        known |= keys

"""The simulation finds each planted bug."""

from __future__ import annotations

import ast

import pytest

from tests.simulation.bug import Change, Planted, after, before, body, each, first, instead, omit, swap
from tests.simulation.fresh_seeds import some_of
from tests.simulation.planted_bugs import BUGS, find
from tests.soak import SOAKING

SEEDS_MAX = 60  # within so many seeds each must be found
# A commit tries a part of the others, drawn from its hash.
# These take longest, 15 s to 200 s each: their like is found by others sooner. `make soak` finds them all.
LONG = frozenset(
    {
        "opening without the batches that nobody counted",
        "retention takes objects before pointers",
        "audit misses what retention took",
        "epoch used again",
        "assignments are set whatever their version",
        "opened without reading the tail",
        "ack=1 before the fsync",
        "sweep takes what pointers name",
        "late batches counted again and again",
        "retention takes what the dedup window needs",
        "lag from too few pointers",
        "lost wake-up after a publish",
        "sweep leaves what it finds",
        "stop without what is held for others",
        "ack=1 blocks dropped with their epoch",
        "nothing left out at publishing",
        "an open block continues over a change of the map",
        "age not refused by the queue",
        "reader passes over what retention took",
        "a slow opening counts",
        "blocks of a lost epoch forwarded at once",
        "sweep takes large objects that manifests name",
        "reader of compacted parts passes over the first pointer",
        "late batches never counted",
        "an index that does not answer is passed over",
        "position of a batch whose copy readers take",
        "a position stays before what a filter leaves out",
        "a broker that is behind answers for an older topic",
        "retention does not wait for a group",
        "retention takes unknown positions for the end",
        "an attempt after the release is complete",
        "auditor judges though a log was not read",
        "T2: a new instance commits what the former one had open",
        "H3: an object that a store does not find for 10 s is dropped",
        "an owner reads on in a log that was cut and filled again",
        "G3: the position that comes with a partition is an old one",
        "a truncation takes what the dedup window needs",
    }
)


@pytest.mark.soak
@pytest.mark.thorough
@pytest.mark.parametrize(
    "bug", some_of((bug for bug in BUGS if SOAKING or bug.name not in LONG), part=24), ids=lambda bug: bug.name
)
def test_a_planted_bug_is_found(bug: Planted) -> None:
    count, found = find(bug, range(bug.seed, bug.seed + SEEDS_MAX))
    assert found, f"not found within {count} seeds"


def test_names_of_bugs_left_to_the_soak_exist() -> None:
    assert {bug.name for bug in BUGS} >= LONG


FUNCTION = """
def work(self):
    if self.ready:
        self.queue.publish(  # laid out in another way than below
            self.head,
            'all'
        )
    return len(self.queue)
"""


def changed(change: Change) -> list[str]:
    """Return the lines of the function after a change."""
    tree = ast.parse(FUNCTION)
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    change(function)
    return [line.strip() for line in ast.unparse(tree).splitlines()[1:]]


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (body("return 0"), ["return 0"]),
        (first("stop()"), ["stop()", "if self.ready:", "@", "return len(self.queue)"]),
        (omit("self.queue.publish"), ["if self.ready:", "pass", "return len(self.queue)"]),
        (instead("self.queue.publish", "stop()"), ["if self.ready:", "stop()", "return len(self.queue)"]),
        (before("self.queue.publish", "stop()"), ["if self.ready:", "stop()", "@", "return len(self.queue)"]),
        (after("self.queue.publish", "stop()"), ["if self.ready:", "@", "stop()", "return len(self.queue)"]),
        (before("len", "stop()"), ["if self.ready:", "@", "stop()", "return len(self.queue)"]),
        (swap("self.ready", "False"), ["if False:", "@", "return len(self.queue)"]),
        (swap("return len( self.queue )", "return 0"), ["if self.ready:", "@", "return 0"]),
        (swap('self.queue.publish(self.head, "all")', "n = 1"), ["if self.ready:", "n = 1", "return len(self.queue)"]),
        (each(swap("self.ready", "0"), swap("self.head", "1")), ["if 0:", "!", "return len(self.queue)"]),
    ],
)
def test_a_change_finds_its_place_whatever_the_layout(change: Change, lines: list[str]) -> None:
    calls = {"@": "self.queue.publish(self.head, 'all')", "!": "self.queue.publish(1, 'all')"}
    assert changed(change) == [calls.get(line, line) for line in lines]


@pytest.mark.parametrize(
    "change",
    [omit("self.publish"), swap("self.tail", "0"), swap("self.queue", "0"), swap("return len(self.head)", "return 0")],
)
def test_a_change_without_one_place_is_refused(change: Change) -> None:
    with pytest.raises(AssertionError, match="times in the function"):
        changed(change)

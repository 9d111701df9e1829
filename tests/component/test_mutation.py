"""The mutants match the product, the tool finds what a test finds, and the lists of known ones are valid."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings

import pytest

from memq.broker.partition.ring import Ring, RingLimits
from tests.mutation.equivalents import load_equivalents
from tests.mutation.fork_pool import Ended, Task
from tests.mutation.hand_made import PATCHES, hand_made
from tests.mutation.live_code import LiveCode, UnreachableError
from tests.mutation.mutant import ROOT, Mutant, function_at
from tests.mutation.nearest import Near, TestMap, TracedTest, load_near, near_of
from tests.mutation.operators import Finder, mutants_of
from tests.mutation.report import Verdict, clearly_below, score, table
from tests.mutation.run import judge
from tests.mutation.scope import PARTS, fast_files, files_of, part_of
from tests.mutation.trial import free_leftovers

SOURCE = '''
from memq.errors import MemqError, QueueError

LIMIT = 3

class Shelf:
    """Some text."""

    def take(self, count, *, quick=False):
        if self.closed:
            return False
        while count > 0 and not self.empty:
            self.shift(count - 1)
            self.book.note(count, quick=True)
        try:
            self.sync()
        except (QueueError, TimeoutError, ValueError):
            raise OSError(f"no {count + 1}")
        return True
'''


def changes() -> set[tuple[str, str, str]]:
    finder = Finder("memq/shelf.py", SOURCE)
    finder.walk(ast.parse(SOURCE))
    return {(mutant.operator, mutant.old, mutant.new) for mutant in finder.found}


def test_each_operator_makes_its_mutants_and_leaves_constants_outside_functions_and_messages() -> None:
    assert changes() == {
        ("condition negated", "self.closed", "(not (self.closed))"),
        ("guard dropped", "if self.closed:\n            return False", "pass"),
        ("answer turned", "False", "True"),
        ("condition negated", "count > 0 and not self.empty", "(not (count > 0 and not self.empty))"),
        ("and/or swapped", "count > 0 and not self.empty", "((count > 0) or (not self.empty))"),
        ("bound moved", "count > 0", "count >= 0"),
        ("constant + 1", "0", "1"),
        ("not removed", "not self.empty", "bool(self.empty)"),
        ("call dropped", "self.shift(count - 1)", "pass"),
        ("plus/minus swapped", "count - 1", "(count + (1))"),
        ("constant + 1", "1", "2"),
        ("constant - 1", "1", "0"),
        ("call dropped", "self.book.note(count, quick=True)", "pass"),
        (
            "order swapped",
            "self.shift(count - 1)\n            self.book.note(count, quick=True)",
            "self.book.note(count, quick=True)\n            self.shift(count - 1)",
        ),
        ("flag turned", "True", "False"),
        ("sync dropped", "self.sync()", "pass"),
        ("except widened", "(QueueError, TimeoutError, ValueError)", "(MemqError, OSError, ValueError)"),
        ("except narrowed", "(QueueError, TimeoutError, ValueError)", "(TimeoutError, ValueError,)"),
        ("except narrowed", "(QueueError, TimeoutError, ValueError)", "(QueueError, ValueError,)"),
        ("except narrowed", "(QueueError, TimeoutError, ValueError)", "(QueueError, TimeoutError,)"),
        ("answer turned", "True", "False"),
    }


@pytest.mark.parametrize(
    ("pair", "swapped"),
    [
        ("self.shift(); self.fill()", True),
        ("self.done.set(); self.fill()", False),  # whoever waits runs after both
        ("self.done.set(); await self.fill()", True),
        ("self.one.clear(); self.two.append(3)", False),
        ("self.one.clear(); self.fill()", True),
        ("self.events.warning('late'); await self.fill()", False),
    ],
)
def test_neighbours_are_swapped_where_their_order_can_matter(pair: str, swapped: bool) -> None:
    source = "async def work(self):\n    " + pair.replace("; ", "\n    ") + "\n"
    finder = Finder("memq/shelf.py", source)
    finder.walk(ast.parse(source))
    assert any(mutant.operator == "order swapped" for mutant in finder.found) is swapped


@pytest.mark.parametrize(
    ("line", "mutants"),
    [
        ("return (a if b else c) > d", {"(not (b))": 1, "(a if b else c) >= d": 1}),
        ("return (a or b) + d", {"((a) and (b))": 1, "((a or b) - (d))": 1}),
        ("return dict(zip(a, b, strict=True))", {}),  # `strict` is an assertion
    ],
)
def test_operands_keep_their_parentheses_and_assertions_of_length_stay(line: str, mutants: dict[str, int]) -> None:
    source = f"def work(a, b, c, d):\n    {line}\n"
    finder = Finder("memq/shelf.py", source)
    finder.walk(ast.parse(source))
    found = [mutant.new for mutant in finder.found]
    assert {new: found.count(new) for new in found} == mutants


def test_a_mutant_keeps_its_key_when_lines_above_it_change() -> None:
    keys = []
    for source in (SOURCE, "# more\n\n" + SOURCE):
        finder = Finder("memq/shelf.py", source)
        finder.walk(ast.parse(source))
        keys.append([mutant.key for mutant in finder.found])
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == len(keys[0])


def test_every_patch_made_by_hand_applies_and_is_python() -> None:
    mutants = hand_made()
    for mutant in mutants:
        compile(mutant.source(), mutant.path, "exec", dont_inherit=True)
        assert mutant.function, f"{mutant} is in no function: a process that runs can't take it"
        assert part_of(mutant.path), f"{mutant} is in no part that is mutated"
    assert len({mutant.key for mutant in mutants}) == len(mutants) >= 48
    assert len({patch.reason for patch in PATCHES}) == len(PATCHES)


def test_every_known_equivalent_is_a_mutant_still() -> None:
    by_path: dict[str, list[Mutant]] = {}
    made_by_hand = hand_made()
    for equivalent in load_equivalents():
        if equivalent.path not in by_path:
            rules = [mutant for mutant in made_by_hand if mutant.path == equivalent.path]
            by_path[equivalent.path] = [*mutants_of(equivalent.path), *rules]
        found = [mutant for mutant in by_path[equivalent.path] if equivalent.covers(mutant)]
        assert found, f"{equivalent} is no mutant any more: remove it, or match it again"
        assert equivalent.reason


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_files(part: str) -> None:
    assert files_of(part)


def test_a_planted_mutant_is_seen_by_those_who_imported_the_function_and_is_taken_out_again() -> None:
    mutant = next(mutant for mutant in mutants_of("memq/broker/partition/ring.py") if mutant.function == "Ring.__len__")
    ring = Ring(RingLimits(4, 100, 10, 1.0, seal_when_idle=True, uploads_in_flight_max=2))
    live = LiveCode()
    assert mutant.operator == "plus/minus swapped"
    ring.open = object()  # type: ignore[assignment]  # it only counts
    assert len(ring) == 1
    live.plant(mutant)
    with pytest.raises(ValueError, match="should return >= 0"):
        len(ring)
    live.restore()
    assert len(ring) == 1


def test_mutant_of_import_code_can_not_be_planted() -> None:
    path = "memq/broker/partition/ring.py"
    source = (ROOT / path).read_text(encoding="utf-8")
    start = len(source[: source.index("WORTH_SHARE = 8")].encode())
    mutant = Mutant(path, "", 1, "by hand", start, start + 15, "WORTH_SHARE = 8", "WORTH_SHARE = 9")
    with pytest.raises(UnreachableError):
        LiveCode().plant(mutant)


def test_the_innermost_function_is_named() -> None:
    tree = ast.parse("class A:\n    def f(self):\n        def g():\n            pass\n")
    assert [function_at(tree, line) for line in (1, 2, 3, 4, 9)] == ["A", "A.f", "A.f.g", "A.f.g", ""]


def test_the_nearest_test_runs_the_function_and_little_else() -> None:
    found = TestMap()
    wanted, other = (
        found.number("memq/broker/partition/ring.py:Ring.seal"),
        found.number("memq/broker/partition/ring.py:Ring.find"),
    )
    found.tests = {
        "tests/a.py::broad": TracedTest([wanted, other], 0.1, passed=True),
        "tests/a.py::near": TracedTest([wanted], 0.1, passed=True),
        "tests/a.py::elsewhere": TracedTest([other], 0.1, passed=True),
        "tests/a.py::red": TracedTest([wanted], 0.1, passed=False),
    }
    texts = {"tests/a.py": "", "tests/b.py": "from memq.broker.partition.ring import Ring", "tests/c.py": ""}
    node_ids = [*found.tests, "tests/b.py::newer", "tests/c.py::newer"]
    mutant = Mutant("memq/broker/partition/ring.py", "Ring.seal", 1, "call dropped", 0, 0, "", "")
    assert found.order(mutant, node_ids, texts) == ([1, 0, 4], [])


def test_the_kept_map_names_the_narrow_test_files_and_leaves_out_slow_tests() -> None:
    found = TestMap()
    seal, find = (
        found.number("memq/broker/partition/ring.py:Ring.seal"),
        found.number("memq/broker/partition/ring.py:Ring.find"),
    )
    other = found.number("memq/broker/partition/batch.py:Batch.add")
    found.tests = {
        "tests/unit/test_ring.py::seals": TracedTest([seal], 0.1, passed=True),
        "tests/unit/test_ring.py::finds": TracedTest([find], 0.1, passed=True),
        "tests/unit/test_wide.py::all[1]": TracedTest([seal, find, other], 0.1, passed=True),
        "tests/unit/test_wide.py::slow[2]": TracedTest([seal], 60.0, passed=True),
        "tests/unit/test_red.py::red": TracedTest([seal], 0.1, passed=False),
    }
    near = near_of(found, ["memq/broker/partition/ring.py", "memq/broker/unreached.py"])
    assert near == Near(
        ["tests/unit/test_wide.py::slow"],
        {"memq/broker/partition/ring.py": ["tests/unit/test_ring.py", "tests/unit/test_wide.py"]},
    )
    mutant = Mutant("memq/broker/partition/ring.py", "Ring.seal", 1, "call dropped", 0, 0, "", "")
    node_ids = ["tests/unit/test_wide.py::slow[2]", "tests/unit/test_wide.py::all[1]", "tests/unit/test_ring.py::seals"]
    assert near.order(mutant, node_ids) == [2, 1]


def test_files_in_near_toml_exist() -> None:
    near = load_near()
    tests = {test for tests in near.files.values() for test in tests} | {each.partition("::")[0] for each in near.slow}
    gone = [path for path in (*near.files, *tests) if not (ROOT / path).exists()]
    assert not gone, f"take these out of tests/mutation/near.toml: {gone}"
    mutated = [path for path in fast_files() if any(mutants_of(path))]
    known = sum(path in near.files for path in mutated)
    assert known >= 0.9 * len(mutated), "python -m tests.mutation.run --keep-near --only - makes near.toml again"


@pytest.mark.parametrize(("message", "outcome"), [({"unjudged": "12 CPU s"}, "unjudged"), ({"stage": ""}, "survived")])
def test_a_mutant_that_its_tests_had_no_time_for_is_neither_found_nor_survived(
    message: dict[str, str], outcome: str
) -> None:
    mutant = next(mutants_of("memq/broker/partition/ring.py"))
    ended = Ended(Task(mutant.key, lambda send: None), [{"at": "a::b", "limit_s": 1.0}, message])
    assert judge(mutant, ended).outcome == outcome
    assert score([judge(mutant, ended)]) == (0, int(outcome == "survived"))


class Unclosed:
    """Warns when it is freed."""

    freed = 0

    def __del__(self) -> None:
        type(self).freed += 1
        warnings.warn("unclosed", ResourceWarning, stacklevel=1)


def test_objects_of_a_failed_test_are_freed_before_its_next_run() -> None:
    """Else its warning fails that run, too, which is to show that the test passes without the mutant."""

    def fail() -> None:
        client = Unclosed()
        raise AssertionError(client)

    try:
        fail()
    except AssertionError as error:
        sys.last_value = error  # as pytest does
    free_leftovers()
    assert Unclosed.freed == 1
    assert not hasattr(sys, "last_value")


def verdict(outcome: str, stage: str = "") -> Verdict:
    return Verdict("0", "memq/broker/partition/ring.py", 1, "Ring.seal", "call dropped", outcome, stage)


def test_the_score_leaves_out_what_makes_no_difference() -> None:
    verdicts = [verdict("killed", "nearest"), verdict("timeout", "fast"), verdict("survived"), verdict("equivalent")]
    assert score(verdicts) == (2, 3)
    assert table(verdicts).splitlines()[-1].split() == ["all", "2/", "3", "67%", "1", "1", "0", "1", "1"]


def test_a_sample_is_clearly_below_when_that_many_survivors_are_improbable() -> None:
    assert not clearly_below(0, 0)
    assert not clearly_below(21, 24, 0.95)
    assert clearly_below(19, 24, 0.95)
    assert not clearly_below(950, 1_000, 0.95)
    assert clearly_below(900, 1_000, 0.95)


@pytest.mark.thorough
def test_a_mutant_is_killed_and_one_without_end_is_ended() -> None:
    """The whole tool once, on a rule that a test of the ring holds, and on a loop that never ends."""
    mutants = [mutant for mutant in mutants_of("memq/broker/partition/ring.py") if mutant.function == "Ring.seal"]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.mutation.run", "--gate", "--only", mutants[0].key],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1/1 killed" in ran.stdout, ran.stdout + ran.stderr
    assert ran.returncode == 0

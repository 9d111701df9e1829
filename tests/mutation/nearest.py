"""The map of the tests: which functions of the product each test runs, and so which tests are nearest to a mutant.

The map is made once, by running every fast test under a trace, and kept in `.mutation/`; a test file that has changed
is traced again. Without a map the nearest tests are those of the files that name the mutant's module.

`near.toml` keeps a small part of the map in the repository, for runs that have no time to make one: the few test files
that reach most of each product file at the least cost.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

import msgspec

from tests.mutation.mutant import ROOT, Mutant

FOLDER = ROOT / ".mutation"
NEAREST_MAX = 40
NEAR = Path(__file__).with_name("near.toml")
NEAR_FILES_MAX = 6
REACHED_BY = 2  # files, for each function
SLOW_TIMES = 100  # as slow as this many usual tests: not for a run that has no time


class TracedTest(msgspec.Struct, frozen=True):
    """What one test runs: functions by their numbers, its wall time, whether it passed."""

    functions: list[int]
    wall_s: float
    passed: bool


class TestMap(msgspec.Struct):
    """`tests` by node id; `functions` are "path:qualified name"; `simulation` those that short simulations run."""

    __test__ = False
    functions: dict[str, int] = msgspec.field(default_factory=dict)
    files: dict[str, str] = msgspec.field(default_factory=dict)  # test file -> hash
    tests: dict[str, TracedTest] = msgspec.field(default_factory=dict)
    simulation: list[int] = msgspec.field(default_factory=list)

    def number(self, function: str) -> int:
        """Return the number of a function."""
        return self.functions.setdefault(function, len(self.functions))

    def numbers_of(self, mutant: Mutant) -> set[int]:
        """Return the numbers of the function that a mutant is in, of all functions of its file when none is known."""
        parts = mutant.function.split(".")
        for count in range(len(parts), 0, -1):
            number = self.functions.get(f"{mutant.path}:{'.'.join(parts[:count])}")
            if number is not None:
                return {number}
        return {number for name, number in self.functions.items() if name.startswith(f"{mutant.path}:")}

    def order(self, mutant: Mutant, node_ids: list[str], texts: dict[str, str]) -> tuple[list[int], list[int]]:
        """Return the tests nearest to a mutant, those that run the fewest other functions first, and the rest of them.

        A test that does not run the function can't find the mutant: it is left out. One that is newer than the map is
        near when its file names the module.
        """
        wanted = self.numbers_of(mutant)
        found = []
        unknown = []
        for at, node_id in enumerate(node_ids):
            test = self.tests.get(node_id)
            if test is None:
                if mutant.module in texts[node_id.partition("::")[0]]:
                    unknown.append(at)
            elif test.passed and not wanted.isdisjoint(test.functions):
                found.append((len(test.functions) * (1 + 4 * test.wall_s), at))
        found.sort()
        tests = [at for _, at in found]
        newer = by_name(mutant, [node_ids[at] for at in unknown], texts)[0]
        return [*tests[:NEAREST_MAX], *(unknown[at] for at in newer)], tests[NEAREST_MAX:]

    def limit_s(self, node_id: str) -> float:
        """Return how long a test may take with a mutant."""
        test = self.tests.get(node_id)
        return 8.0 + 5 * (test.wall_s if test else 5.0)


def by_name(mutant: Mutant, node_ids: list[str], texts: dict[str, str]) -> tuple[list[int], list[int]]:
    """Return the tests of the files that name the mutant's module, most often first; then its package; then all."""
    package = mutant.module.rpartition(".")[0]
    named: list[tuple[int, int]] = []
    others: list[int] = []
    rest: list[int] = []
    for at, node_id in enumerate(node_ids):
        text = texts[node_id.partition("::")[0]]
        count = text.count(mutant.module)
        if count:
            named.append((-count * 10_000 // len(text), at))
        else:
            (others if package in text else rest).append(at)
    named.sort()
    tests = [at for _, at in named] + others + rest
    return tests[:NEAREST_MAX], tests[NEAREST_MAX:]


class Near(msgspec.Struct, forbid_unknown_fields=True):
    """Test files for each product file, the narrowest first; `slow` are node ids in them that take too long."""

    slow: list[str]
    files: dict[str, list[str]]

    def files_of(self, mutant: Mutant) -> list[str]:
        """Return the test files for a mutant; those that name its module when none is kept."""
        if mutant.path not in self.files:
            files = sorted(path for ring in ("unit", "component") for path in (ROOT / "tests" / ring).glob("test_*.py"))
            named = [file for file in files if mutant.module in file.read_text(encoding="utf-8")]
            self.files[mutant.path] = [file.relative_to(ROOT).as_posix() for file in named]
        return self.files[mutant.path]

    def order(self, mutant: Mutant, node_ids: list[str]) -> list[int]:
        """Return the tests to run for a mutant, by their places in the session."""
        rank = {file: at for at, file in enumerate(self.files_of(mutant))}
        found = [
            (rank[file], at)
            for at, node_id in enumerate(node_ids)
            if (file := node_id.partition("::")[0]) in rank and node_id.partition("[")[0] not in self.slow
        ]
        return [at for _, at in sorted(found)]


def load_near() -> Near:
    """Return what the repository keeps."""
    return msgspec.convert(tomllib.loads(NEAR.read_text(encoding="utf-8")), Near)


def near_of(found: TestMap, paths: list[str]) -> Near:
    """Return the test files that reach each function of a product file twice, where that many do, and little else."""
    costs: Counter[str] = Counter()
    reached: dict[str, set[int]] = {}
    usual_s = median(test.wall_s for test in found.tests.values())
    slow = sorted({each.partition("[")[0] for each, test in found.tests.items() if test.wall_s > SLOW_TIMES * usual_s})
    for node_id, test in found.tests.items():
        if node_id.partition("[")[0] not in slow and test.passed:
            file = node_id.partition("::")[0]
            costs[file] += max(1, round(test.wall_s / usual_s))
            reached.setdefault(file, set()).update(test.functions)
    files: dict[str, list[str]] = {}
    for path in paths:
        inside = {number for name, number in found.functions.items() if name.startswith(f"{path}:")}
        own = {file: numbers & inside for file, numbers in reached.items() if numbers & inside}
        wanted = Counter(number for numbers in own.values() for number in numbers)
        left = Counter({number: min(REACHED_BY, count) for number, count in wanted.items()})
        while (rest := sum(left.values())) and len(files.get(path, ())) < NEAR_FILES_MAX:
            worth = {
                file: sum(left[number] > 0 for number in numbers) / rest * len(numbers) / len(reached[file])
                for file, numbers in own.items()
            }
            best = max(worth, key=lambda file: (worth[file] / math.sqrt(50 + costs[file]), file))
            files.setdefault(path, []).append(best)
            left -= Counter(own.pop(best))
    return Near(slow, files)


def store_near(near: Near) -> None:
    """Keep it."""
    lines = [
        "# The test files that the gate of `make check` runs for the mutants of a product file, the narrowest first.",
        "# `python -m tests.mutation.run --keep-near` writes it from the map of the tests; lines may be edited.",
        "slow = [  # left out: each takes as long as a hundred others",
        *(f'  "{each}",' for each in near.slow),
        "]\n\n[files]",
        *(f'"{path}" = {msgspec.json.encode(files).decode().replace(",", ", ")}' for path, files in near.files.items()),
    ]
    NEAR.write_text("\n".join(lines) + "\n", encoding="utf-8")


def hash_of(file: str) -> str:
    """Return the hash of a test file."""
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16]


def replace_file(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all: runs are ended at any time."""
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(data)
    fresh.replace(path)


def load_map(path: Path = FOLDER / "tests.json") -> TestMap:
    """Return the map as it was kept; an empty one when there is none."""
    return msgspec.json.decode(path.read_bytes(), type=TestMap) if path.exists() else TestMap()


def store_map(found: TestMap, path: Path = FOLDER / "tests.json") -> None:
    """Keep the map."""
    path.parent.mkdir(exist_ok=True)
    (path.parent / ".gitignore").write_text("*\n")
    replace_file(path, msgspec.json.encode(found))


@contextmanager
def traced() -> Iterator[Callable[[], list[str]]]:
    """Note the functions of the product that run meanwhile, in all threads; what is yielded names and forgets them."""
    seen: dict[int, CodeType] = {}
    inside = f"{ROOT}/memq/"

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        seen[id(code)] = code

    def names() -> list[str]:
        codes = [code for code in list(seen.values()) if code.co_filename.startswith(inside)]
        seen.clear()
        found = (
            f"{code.co_filename[len(str(ROOT)) + 1 :]}:{code.co_qualname.partition('.<locals>')[0]}" for code in codes
        )
        return sorted({name for name in found if not name.endswith(">")})

    sys.settrace(note)
    threading.settrace(note)
    try:
        yield names
    finally:
        sys.settrace(None)
        threading.settrace(None)

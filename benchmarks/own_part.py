"""The broker's own part per GB, without sockets: in Python, and with the compiled kernel where it is installed.

Both are processes of their own and take turns. `take` checks and appends the blocks; `seal` makes object and pointer.
"""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.child import Child
from benchmarks.results import Figure, Options
from memq.limits import KIB, MIB

NAME = "own_part"
SIZES = (4 * KIB, 64 * KIB, 1 * MIB)
ROUNDS = 5  # for each of the options' rounds: one takes 20 to 60 ms
Costs = dict[str, list[float]]


def run(options: Options) -> list[Figure]:
    """Measure every size."""
    figures = []
    kinds = {"Python": "0"} | ({"compiled": "broker"} if find_spec("memq_native") else {})
    for size in SIZES:
        children = {kind: Child("own_part", environment={"MEMQ_NATIVE": parts}) for kind, parts in kinds.items()}
        try:
            found = take_turns(children, size, options.rounds * ROUNDS)
        finally:
            for child in children.values():
                child.stop()
        for kind, costs in found.items():
            detail: dict[str, float | str] = {name: min(values) for name, values in costs.items()}
            figures.append(Figure(NAME, f"{size // KIB} KiB blocks, {kind}", min(costs["all"]), "CPU-s/GB", None))
            figures[-1].detail.update(detail)
            options.say(figures[-1].line())
    return figures


def take_turns(children: dict[str, Child], block_bytes: int, rounds: int) -> dict[str, Costs]:
    """Return the CPU seconds per GB of each round, by step; the first round of each child warms up."""
    found: dict[str, Costs] = {kind: {"all": [], "take µs/block": [], "seal µs/block": []} for kind in children}
    for child in children.values():
        child.ask("round", block_bytes=block_bytes)
    for _ in range(rounds):
        for kind, child in children.items():
            each = child.ask("round")
            found[kind]["all"].append((each["take_s"] + each["seal_s"]) / each["bytes"] * 1e9)
            found[kind]["take µs/block"].append(each["take_s"] / each["blocks"] * 1e6)
            found[kind]["seal µs/block"].append(each["seal_s"] / each["blocks"] * 1e6)
    return found

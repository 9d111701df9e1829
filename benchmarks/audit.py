"""Cost of reports to the audit: producer, broker and consumer with and without reports, in turns.

Two brokers, one of a cluster that audits, each with a producer and a consumer in processes of their own; the CPU is
that of all three, each at its least, from connect to close, so that last reports count; the rate is the best of each
side. The difference is small, and other work on the machine only adds to it: so flows are short and many. The bytes are
what the broker received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks.child import Child
from benchmarks.concurrent_runs import ConcurrentRuns
from benchmarks.results import Figure, Options, median

NAME = "audit"
CASES = (("1 KB, full blocks", "values", 1_000, 20_000), ("100 B, a record a block", "paced", 100, 500))
ROUNDS = 4  # as many as other rows have, so many times
CPU_BOUND, RATE_BOUND, BYTES_BOUND = 1.02, 0.98, 1.01
BEST: dict[str, Callable[[Sequence[float]], float]] = {"rate": max, "bytes": median}  # of all else the least


class Side(ConcurrentRuns):
    """A broker with its producer and its consumer."""

    def __init__(self, *, audit: bool) -> None:
        with ExitStack() as stack:
            self.broker = stack.enter_context(Child("broker", store="recent", settings={"audit": audit}))
            self.writer = stack.enter_context(Child("memq_client", address=self.broker.ready["address"]))
            self.reader = stack.enter_context(Child("memq_client", address=self.broker.ready["address"]))
            self._stack = stack.pop_all()

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each of the three."""
        children = {"broker": self.broker, "writer": self.writer, "reader": self.reader}
        return {f"{name} CPU": child.cpu_s() for name, child in children.items()}

    def flow(self, params: dict[str, object]) -> dict[str, float]:
        """Send and read a topic; return CPU seconds, records per second and received bytes."""
        cpu_s, before = self.cpu_s(), self.broker.ask("look")["received_bytes"]
        wrote = self.writer.ask("produce", partitions=1, **params)
        self.reader.ask("consume", topic=params["topic"], records=params["records"])
        received = self.broker.ask("look")["received_bytes"] - before
        rate = int(str(params["records"])) / (wrote["ended_s"] - wrote["began_s"])
        cost = {name: seconds - cpu_s[name] for name, seconds in self.cpu_s().items()}
        return {**cost, "rate": rate, "bytes": received}


def run(options: Options) -> list[Figure]:
    """Measure both in turn, with blocks that are full and with the least that there are."""
    figures: list[Figure] = []
    with Side(audit=False) as without, Side(audit=True) as audited:
        for case, how, size, records in CASES:
            found = measure(without, audited, {"how": how, "size": size, "records": records}, options)
            best = {
                name: tuple(BEST.get(name, min)(values) for values in zip(*pairs, strict=True))
                for name, pairs in found.items()
            }
            ratios = {name: after / before for name, (before, after) in best.items()}
            detail: dict[str, float | str] = {
                f"{name} {side}": value
                for name, pair in best.items()
                for side, value in zip(("without", "with"), pair, strict=True)
            }
            before, after = (sum(pair[at] for name, pair in best.items() if name.endswith("CPU")) for at in (0, 1))
            figures.append(Figure(NAME, f"{case}: CPU", after / before, "x", CPU_BOUND, "lower", detail))
            if how == "values":  # the other one is paced, and so small that its reports are a share of its bytes
                figures.append(Figure(NAME, f"{case}: rate", ratios["rate"], "x", RATE_BOUND, "higher"))
                figures.append(Figure(NAME, f"{case}: bytes", ratios["bytes"], "x", BYTES_BOUND))
    for figure in figures:
        options.say(figure.line())
    return figures


def measure(
    without: Side, audited: Side, params: dict[str, object], options: Options
) -> dict[str, list[tuple[float, float]]]:
    """Return the pairs (without, with) of each figure; who comes first changes from round to round."""
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(ROUNDS * options.rounds + 1):
        params = {**params, "topic": f"audit-{params['how']}-{number}"}
        sides = (without, audited) if number % 2 else (audited, without)
        values = {side: side.flow(params) for side in sides}
        for name, before in values[without].items():
            if number:  # the first round warms up
                found.setdefault(name, []).append((before, values[audited][name]))
    return found

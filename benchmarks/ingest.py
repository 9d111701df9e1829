"""Row 1: the broker's cost per GB received, compared with a plain `recv_into` loop over the same bytes.

The broker checks every block, keeps it, builds objects and pointers, and acks; its store discards. A second loop, the
floor, also keeps what it receives and takes one checksum of each block. The receivers are processes of their own, the
sender is the same one, and the rounds alternate.
"""

from __future__ import annotations

from benchmarks.child import Child
from benchmarks.results import Figure, Options, median
from memq.limits import KIB, MIB

NAME = "ingest"
CASES = [
    (4 * KIB, 1, 2.0),
    (4 * KIB, 64, 2.0),
    (64 * KIB, 1, 1.4),
    (64 * KIB, 64, 1.4),
    (1 * MIB, 1, 1.4),
    (1 * MIB, 64, 1.4),
]


def run(options: Options) -> list[Figure]:
    """Measure every case."""
    figures = []
    with (
        Child("broker", store="discard", cubic=True) as broker,
        Child("sink") as loop,
        Child("sender") as sender,
    ):
        for block_bytes, connections, bound in CASES:
            with Child("sink", checked_block_bytes=block_bytes) as floor:
                receivers = {"broker": broker, "loop": loop, "floor": floor}
                costs, rate = take_turns(receivers, sender, block_bytes, connections, options)
            case = f"{block_bytes // KIB} KiB blocks, {connections} conn"
            detail: dict[str, float | str] = {f"{name} CPU-s/GB": cost for name, cost in costs.items()}
            detail |= {"broker GB/s": rate, "over the floor": costs["broker"] / costs["floor"]}
            figures.append(Figure(NAME, case, costs["broker"] / costs["loop"], "x", bound, detail=detail))
            options.say(figures[-1].line())
    return figures


def take_turns(
    receivers: dict[str, Child], sender: Child, block_bytes: int, connections: int, options: Options
) -> tuple[dict[str, float], float]:
    """Return the median CPU seconds per GB of each receiver, and the broker's GB/s; the first round warms up."""
    total = (128 if options.quick else 512) * MIB
    costs: dict[str, list[float]] = {name: [] for name in receivers}
    rates: list[float] = []
    for number in range(options.rounds + 1):
        for name, receiver in receivers.items():
            cost, rate = measure(receiver, sender, block_bytes, connections, total)
            if number:
                costs[name].append(cost)
                rates += [rate] if name == "broker" else []
    return {name: median(values) for name, values in costs.items()}, median(rates)


def measure(receiver: Child, sender: Child, block_bytes: int, connections: int, total: int) -> tuple[float, float]:
    """Return the receiver's CPU seconds per GB and the rate in GB/s."""
    params = sender.ask(
        "prepare",
        address=receiver.ready["address"],
        topic="bench",
        block_bytes=block_bytes,
        connections=connections,
        total_bytes=total,
        acked=receiver.name == "broker",
    )
    before = receiver.cpu_s()
    seconds = sender.ask("run")["seconds"]
    gigabytes = params["total_bytes"] / 1e9
    return (receiver.cpu_s() - before) / gigabytes, gigabytes / seconds

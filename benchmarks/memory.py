"""Row 7: the broker's memory, idle, and with its store stalled while clients send ten times its budget."""

from __future__ import annotations

import time

from benchmarks.child import Child
from benchmarks.results import Figure, Options
from memq.limits import KIB, MIB

NAME = "memory"
IDLE_MIB_MAX = 64.0
BUDGET_BYTES = 64 * MIB
OVERLOAD = 10
SAMPLE_S = 0.1
CONNECTIONS = 64


def run(options: Options) -> list[Figure]:
    """Measure idle memory, then the greatest while the store stalls and while it catches up."""
    stall_s = 10.0 if options.quick else 60.0
    with (
        Child("broker", store="discard", settings={"memory_bytes_max": BUDGET_BYTES}) as broker,
        Child("sender") as sender,
    ):
        idle = broker.memory_bytes()
        sender.ask(
            "prepare",
            address=broker.ready["address"],
            topic="bench",
            block_bytes=64 * KIB,
            connections=CONNECTIONS,
            total_bytes=OVERLOAD * BUDGET_BYTES,
            acked=True,
            window_bytes=1 << 60,
        )
        broker.ask("stall")
        sender.send_command("run")
        peak = watch(broker, stall_s)
        leased = broker.ask("go")["leased_bytes"]
        peak = max(peak, watch(broker, 2.0))
        seconds = sender.answer()["seconds"]  # all of it is acked after all
    over = (peak - idle) / BUDGET_BYTES
    detail: dict[str, float | str] = {
        "idle MiB": idle / MIB,
        "peak MiB": peak / MIB,
        "budget MiB": BUDGET_BYTES / MIB,
        "leased MiB at the end of the stall": leased / MIB,
        "all acked after s": seconds,
    }
    figures = [
        Figure(NAME, "idle broker", idle / MIB, "MiB", IDLE_MIB_MAX),
        Figure(NAME, f"store stalled {stall_s:g} s, 10x overload", over, "budgets", 1.2, detail=detail),
    ]
    for figure in figures:
        options.say(figure.line())
    return figures


def watch(broker: Child, seconds: float) -> int:
    """Return the greatest memory of the broker within `seconds`."""
    until_s, peak = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        peak = max(peak, broker.memory_bytes())
        time.sleep(SAMPLE_S)
    return peak

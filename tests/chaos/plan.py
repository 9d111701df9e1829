"""The plan of a chaos run: which fault strikes which part, when and for how long. A pure function of its seed."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

BROKERS, KAFKAS, ZOOKEEPERS = 3, 3, 3
MEMBERS = 3
CALM_AT_START_S = 5.0  # every client has its first acks
CALM_AT_END_S = 10.0
GAP_S = (0.5, 8.0)  # from the begin of one fault to the begin of the next
LONG_PAUSE_S = (85.0, 100.0)  # longer than the dedup window of 80 s (`stack.TOPIC`)
LONG_PAUSE_RATE = 0.2  # of the pauses of brokers
LONG_RUN_S = 900.0  # shorter runs have no long pauses
SPARK_RUN_S = 600.0  # shorter runs have no stream of Spark: it takes a minute to start where others work
CLOCK_STEP_S = (-9.0, 9.0)  # any two clocks stay within the 20 s that the guarantees allow


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: it begins at `at_s` after the start and lasts for `lasts_s`; `amount` is its size where it has one."""

    at_s: float
    kind: str
    target: str
    lasts_s: float
    amount: float = 0.0

    def as_row(self) -> dict[str, object]:
        """Return the fault as plain values, for the report."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault: its name, what it can strike, how long it lasts in seconds, and its weight in the draw."""

    name: str
    targets: tuple[str, ...]
    lasts_s: tuple[float, float]
    weight: int


def numbered(name: str, count: int) -> tuple[str, ...]:
    """Return `name-1` to `name-count`."""
    return tuple(f"{name}-{number}" for number in range(1, count + 1))


_BROKERS = numbered("broker", BROKERS)
_KAFKAS = numbered("kafka", KAFKAS)
_ZOOKEEPERS = numbered("zookeeper", ZOOKEEPERS)
_LINKS = (*_KAFKAS, *(f"{name}:{part}" for name in _BROKERS for part in ("clients", "s3", "zookeeper")))
_STORE_LINKS = tuple(f"{name}:s3" for name in _BROKERS)

KINDS = (
    Kind("broker-kill", _BROKERS, (0.0, 5.0), 8),
    Kind("broker-pause", _BROKERS, (1.0, 20.0), 6),
    Kind("broker-restart", _BROKERS, (0.0, 2.0), 3),
    Kind("rolling-restart", ("brokers",), (0.0, 0.0), 1),
    Kind("kafka-kill", _KAFKAS, (0.5, 8.0), 3),
    Kind("kafka-pause", _KAFKAS, (1.0, 10.0), 4),
    Kind("zookeeper-kill", _ZOOKEEPERS, (0.5, 8.0), 3),
    Kind("zookeeper-pause", _ZOOKEEPERS, (1.0, 10.0), 3),
    Kind("zookeepers-pause", ("zookeepers",), (0.5, 6.0), 1),
    Kind("store-kill", ("s3",), (0.5, 5.0), 2),
    Kind("store-pause", ("s3",), (1.0, 12.0), 3),
    Kind("link-cut", _LINKS, (0.5, 12.0), 5),
    Kind("link-silent", _LINKS, (1.0, 15.0), 5),
    Kind("link-deaf", _LINKS, (1.0, 15.0), 4),
    Kind("link-slow", _LINKS, (2.0, 20.0), 4),
    Kind("link-torn", _LINKS, (2.0, 15.0), 4),
    Kind("store-flip", _STORE_LINKS, (2.0, 15.0), 4),
    Kind("store-400", _STORE_LINKS, (1.0, 10.0), 3),
    Kind("store-403", _STORE_LINKS, (1.0, 10.0), 2),
    Kind("store-404", _STORE_LINKS, (1.0, 10.0), 2),
    Kind("store-503", _STORE_LINKS, (1.0, 15.0), 3),
    Kind("clock-step", _BROKERS, (5.0, 30.0), 3),
    Kind("disk-full", _BROKERS, (2.0, 15.0), 3),
    Kind("member-kill", numbered("member", MEMBERS), (0.0, 3.0), 4),
    Kind("member-pause", numbered("member", MEMBERS), (1.0, 15.0), 4),
    Kind("named-kill", ("named",), (0.0, 1.0), 3),
    Kind("staged-kill", ("staged",), (0.0, 1.0), 2),
)
# Faults that may strike while brokers still run the revision before: what the present one repairs is not judged there.
BEFORE_UPGRADE = frozenset(
    {"broker-kill", "broker-pause", "broker-restart", "member-kill", "member-pause", "named-kill", "staged-kill"}
)
SPARK_KINDS = (Kind("spark-kill", ("spark",), (0.0, 2.0), 3),)


def hands_meet(part: str, other: str) -> bool:
    """Whether faults of both parts would have one switch in their hands: a broker and its links are one part."""
    part, other = (name.removesuffix("s") if name in ("brokers", "zookeepers") else name for name in (part, other))
    return part.startswith(other) or other.startswith(part)


def draw_plan(seed: int, seconds: float) -> list[Fault]:
    """Return the faults of a run of so many seconds, in the order of their begin; none outlasts the calm at the end."""
    draw = random.Random(f"chaos/{seed}")
    kinds = (*KINDS, *SPARK_KINDS) if seconds >= SPARK_RUN_S else KINDS
    faults: list[Fault] = []
    busy: dict[str, float] = {}  # part: when the fault that strikes it ends
    at_s = CALM_AT_START_S
    while True:
        at_s += draw.uniform(*GAP_S)
        kind = draw.choices(kinds, [each.weight for each in kinds])[0]
        target = draw.choice(kind.targets)
        lasts_s = draw.uniform(*kind.lasts_s)
        if kind.name == "broker-pause" and seconds >= LONG_RUN_S and draw.random() < LONG_PAUSE_RATE:
            lasts_s = draw.uniform(*LONG_PAUSE_S)
        amount = draw.uniform(*CLOCK_STEP_S) if kind.name == "clock-step" else draw.random()
        if at_s + max(lasts_s, CALM_AT_END_S) > seconds:
            return faults
        if any(until_s > at_s for name, until_s in busy.items() if hands_meet(name, target)):
            continue  # nobody would know when it is healed
        busy[target] = at_s + lasts_s + 1.0
        faults.append(Fault(round(at_s, 3), kind.name, target, round(lasts_s, 3), round(amount, 6)))

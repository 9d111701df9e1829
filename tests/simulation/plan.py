"""The plan of one run, drawn from its seed: cluster, clients, fault level, and aspects, which only some runs have."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from memq.simulation.cluster import ClusterShape
from memq.simulation.ports.faults import LEVELS, WorldFaults
from tests.simulation.aspects import ASPECTS, CHANGES, RATE, RATES, SCALE, SEIZED_PAUSE_S_MAX
from tests.simulation.plan_settings import draw_settings
from tests.simulation.reduced_constants import (
    Constants,
    constants_of,
)
from tests.simulation.wishes import Wish

IDLE_WINDOWS = 4.0  # dedup windows in the life of a topic that expires


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of one run: cluster, clients, faults, checks."""

    seed: int
    faults: WorldFaults
    shape: ClusterShape
    producers: tuple[str, ...] = ("plain",)  # "plain", "product", or that with acks: "one", "none", "named", "staged"
    consumers: tuple[str, ...] = ()  # the group of each
    blocks: int = 150  # per producer
    block_records_max: int = 5
    pace_s_max: float = 0.2
    active_s: float = 150.0  # for how long the weather lasts at most; then the world is healed,
    settle_s: float = 180.0  # and has so long: hanging calls last 40 s, silent peers up to 120 s
    rest_s: float = 0.0  # how long each producer rests in the middle, so that what it sent grows old
    wanders: bool = False  # consumers pause and seek
    named_rest_s_max: float = 0.0  # for how long a name is silent between its instances
    keyed: bool = False  # the product's producers send by keys
    audits: bool = False  # a process audits the topic again and again, as the command `memq audit` does,
    audits_later_ms: int = 0  # as if it were so much later
    audited: bool = False  # an auditor runs
    wishes: dict[str, Wish] | None = None  # the filters of groups; if there are, records have tags and headers
    retry_ms: int = 0  # for how long after its first try a task of a direct writer may run again
    constants: Constants = field(default_factory=dict)  # of the product, on another scale

    @property
    def end_s(self) -> float:
        """How long a healed world has until all are done: a rest that began in bad weather lasts into it.

        A topic that expires rests and is read for up to two windows, and then is idle for one and a quarter.
        """
        idle_s = IDLE_WINDOWS * self.shape.settings.dedup_window_ms / 1000 if "idle" in self.producers else 0.0
        return self.settle_s + max(self.rest_s, self.named_rest_s_max, idle_s)


def draw_plan(
    seed: int, level: str, producers: tuple[str, ...] = ("plain", "product"), aspects: tuple[str, ...] | None = None
) -> Plan:
    """Draw the cluster of a seed; the aspects too, each for some seeds, unless they are given."""
    draw = random.Random(f"{seed}/aspects")
    drawn = tuple(name for name in ASPECTS if draw.random() < RATES.get(name, RATE))
    names = drawn if aspects is None else aspects
    retry_ms = _draw_retry_ms(seed, level) if "direct" in names else 0
    plan = _draw_bare_plan(seed, level, producers, retry_ms)
    for name in sorted(names, key=lambda name: (name != SCALE, ASPECTS.index(name))):  # in one order, however given
        plan = CHANGES[name](plan, level, random.Random(f"{seed}/{name}"))
    return replace(plan, constants={**constants_of(seed), **plan.constants})


def _draw_retry_ms(seed: int, level: str) -> int:
    """Return how long tasks run again: a process may be paused twice in it, see `direct_life`."""
    pause_s_max = max(LEVELS[level]().chaos.pause_s_max, SEIZED_PAUSE_S_MAX)
    return int(2_000 * pause_s_max) + random.Random(f"{seed}/retries").choice([2_000, 20_000])


def _draw_bare_plan(seed: int, level: str, producers: tuple[str, ...], retry_ms: int) -> Plan:
    draw = random.Random(f"{seed}/plan")
    stale_ms = draw.choice([1_000, 2_000, 3_000])
    delivery_ms = draw.choice([4_000, 10_000, 30_000])
    settings = draw_settings(stale_ms, delivery_ms, draw, retry_ms=retry_ms)
    shape = ClusterShape(
        brokers=draw.randint(1, 3),
        partitions=draw.choice([1, 1, 2]),
        refuse=draw.choice(["epoch", "age"]),
        session_timeout_ms=draw.choice([300, 1_000, 5_000]),
        governor_ms=draw.choice([100, 500]),
        settings=settings,
    )
    kinds = tuple(draw.choice(producers) for _ in range(draw.randint(1, 3)))
    consumers = tuple(f"g{draw.randrange(2)}" for _ in range(draw.randint(1, 3)))
    pace_s = draw.choice([0.02, 0.1, 0.4])
    faults = LEVELS[level]()
    faults = replace(faults, chaos=faults.chaos.slower(draw.choice([1, 1, 2, 5])))
    blocks, block_records_max = draw.randint(40, 150), draw.randint(1, 10)
    plan = Plan(seed, faults, shape, kinds, consumers, blocks, block_records_max, pace_s, retry_ms=retry_ms)
    return with_quick_failover(plan) if level == "sleepy" and draw.random() < 0.5 else plan


def with_quick_failover(plan: Plan) -> Plan:
    """Return the plan with owners that are replaced within S, by a queue that refuses by age: their worst case."""
    draw = random.Random(f"{plan.seed}/quick")
    settings = draw_settings(3_000, 10_000, draw, plan.shape.clock_error_ms, retry_ms=plan.retry_ms)
    shape = replace(
        plan.shape, brokers=3, partitions=1, refuse="age", session_timeout_ms=300, governor_ms=100, settings=settings
    )
    faults = replace(plan.faults, chaos=replace(plan.faults.chaos, pause_every_s=0.7, pause_s_max=SEIZED_PAUSE_S_MAX))
    return replace(plan, shape=shape, faults=faults)

"""Rates (0 to 1) and bounds (seconds) of every fault, in four levels from calm to stormy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memq.simulation.ports.disk import DiskFaults
from memq.simulation.ports.wrong_answers import WrongAnswerRates
from memq.simulation.world.network import NetworkFaults


@dataclass(frozen=True, slots=True)
class CallFaults:
    """Faults of the calls of one service (store, queue, coordinator). The rates add up to at most 1."""

    latency_s_min: float = 0.001
    latency_s_max: float = 0.01
    before_rate: float = 0.0  # an error without an effect
    after_rate: float = 0.0  # an error after the effect: the answer is lost
    late_rate: float = 0.0  # an error, and the effect up to `late_s_max` later
    hang_rate: float = 0.0  # an error after `hang_s`, longer than any caller waits; half have an effect
    stall_rate: float = 0.0  # an answer, after up to `stall_s_max`
    late_s_max: float = 5.0
    stall_s_max: float = 5.0
    hang_s: float = 40.0
    rate: float = field(init=False)  # of all faults together

    def __post_init__(self) -> None:
        rate = self.before_rate + self.after_rate + self.late_rate + self.hang_rate + self.stall_rate
        assert rate <= 1, f"fault rates add up to {rate}"
        object.__setattr__(self, "rate", rate)


@dataclass(frozen=True, slots=True)
class ChaosFaults:
    """Events of processes and links: mean seconds between two of a kind (0: never), and their length."""

    kill_every_s: float = 0.0
    down_s_max: float = 5.0
    pause_every_s: float = 0.0
    pause_s_max: float = 3.0
    link_cut_every_s: float = 0.0
    link_cut_s_max: float = 5.0
    stop_every_s: float = 0.0
    move_every_s: float = 0.0
    seize_every_s: float = 0.0  # a partition gets another owner, without notice to the last one
    jump_every_s: float = 0.0  # a wall clock is set, within the allowed error
    reshape_every_s: float = 0.0  # a write partition is split, or two are joined
    sick_every_s: float = 0.0  # the store refuses to put some keys, and takes all others
    sick_s_max: float = 0.0
    part_every_s: float = 0.0  # one log of the queue, or the objects of one partition, fail or hang
    part_s_max: float = 0.0
    log_cut_every_s: float = 0.0  # a log is cut: it loses its newest entries
    log_cut_age_ms_max: int = 0  # the greatest age of an entry that a log cut takes; 0: any age
    log_cut_live_rate: float = 0.0  # in this share of the log cuts the brokers continue; else all are killed
    disk_every_s: float = 0.0  # a disk of a spool is full, read-only, or fails to sync
    disk_s_max: float = 0.0
    refuse_every_s: float = 0.0  # a live broker's port refuses new connections
    refuse_s_max: float = 0.0
    suspicion_every_s: float = 0.0  # a client reports any broker to any other one, rightly or wrongly

    def slower(self, factor: float) -> ChaosFaults:
        """Return the same with `factor` times the time between events."""
        names = ("kill_every_s", "pause_every_s", "link_cut_every_s", "stop_every_s", "move_every_s", "seize_every_s")
        return replace(self, **{name: getattr(self, name) * factor for name in names})


@dataclass(frozen=True, slots=True)
class WorldFaults:
    """Everything that can go wrong in one run."""

    network: NetworkFaults = field(default_factory=NetworkFaults)
    store: CallFaults = field(default_factory=CallFaults)
    queue: CallFaults = field(default_factory=CallFaults)
    coordinator: CallFaults = field(default_factory=CallFaults)
    disk: DiskFaults = field(default_factory=DiskFaults)
    chaos: ChaosFaults = field(default_factory=ChaosFaults)
    lies: Mapping[str, WrongAnswerRates] = field(default_factory=dict)  # by service: store, queue, coordinator

    def is_only_a_part_sick(self) -> bool:
        """Whether the only faults are those of single logs and of partitions' objects."""
        chaos = replace(self.chaos, part_every_s=0.0, part_s_max=0.0)
        return bool(self.chaos.part_every_s) and replace(self, chaos=chaos) == calm()


def calm() -> WorldFaults:
    """Only latency, and bytes cut into pieces: a failure here would happen to every user."""
    return WorldFaults()


def breezy() -> WorldFaults:
    """A bad day: some errors and lost answers, short pauses, a restart now and then."""
    call = CallFaults(
        latency_s_max=0.05, before_rate=0.02, after_rate=0.02, late_rate=0.01, stall_rate=0.02, stall_s_max=2.0
    )
    return WorldFaults(
        network=NetworkFaults(spike_rate=0.005),
        store=call,
        queue=call,
        coordinator=replace(call, before_rate=0.01),
        chaos=ChaosFaults(
            kill_every_s=20,
            pause_every_s=15,
            pause_s_max=1.0,
            link_cut_every_s=20,
            link_cut_s_max=2.0,
            stop_every_s=40,
            move_every_s=20,
        ),
    )


def stormy() -> WorldFaults:
    """Everything at once: late and lost answers, hangs, pauses longer than S, cut links, kills."""
    call = CallFaults(
        latency_s_max=0.2,
        before_rate=0.06,
        after_rate=0.08,
        late_rate=0.06,
        hang_rate=0.02,
        stall_rate=0.06,
        late_s_max=8.0,
        stall_s_max=5.0,
    )
    return WorldFaults(
        network=NetworkFaults(spike_rate=0.02, tiny_piece_rate=0.05, small_piece_rate=0.3),
        store=call,
        queue=call,
        coordinator=replace(call, hang_rate=0.01),
        chaos=ChaosFaults(
            kill_every_s=8,
            pause_every_s=6,
            pause_s_max=6.0,
            link_cut_every_s=6,
            link_cut_s_max=8.0,
            stop_every_s=25,
            move_every_s=10,
        ),
    )


def sleepy() -> WorldFaults:
    """Processes that pause for longer than S and than their sessions, and slow services."""
    call = CallFaults(latency_s_min=0.02, latency_s_max=0.3, after_rate=0.02, stall_rate=0.05, stall_s_max=3.0)
    return WorldFaults(
        store=call,
        queue=replace(call, late_rate=0.05, late_s_max=2.0),
        coordinator=replace(call, latency_s_max=0.05, stall_rate=0.0),
        chaos=ChaosFaults(pause_every_s=1.5, pause_s_max=7.0),
    )


LEVELS = {"calm": calm, "breezy": breezy, "stormy": stormy, "sleepy": sleepy}

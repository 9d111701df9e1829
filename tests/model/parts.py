"""The parts of the ownership model: one write partition, its queue, brokers that own it in turn, and one producer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Rules:
    """Which rules hold, all of them by default, and the bounds of one schedule. Times are in ticks."""

    opened: bool = True  # 1: a higher epoch is announced before it is used
    tail: bool = True  # 1: an opening rebuilds what the queue holds
    window_ticks: int = 4  # W, at least D + 2 S
    read_between: bool = True  # 3: what came between the own pointers is read
    proof_at_hand_over: bool = True  # 3: and not when its answer is read
    refuse: bool = True  # 4: the queue refuses what is older than S
    skip: bool = True  # 4: what the queue holds is left out
    one_in_flight: bool = True  # 4
    late_acks: bool = True  # 4: a copy is acked when what it copies is in the queue
    whole_ring: bool = True  # 5: a batch is never passed over
    end_epoch: bool = True  # 5: a ring that is given up ends its epoch
    oldest_first: bool = True  # 7: unacked blocks are sent again in order
    clock_after_hello: bool = True  # 7: the producer's clock starts when it has read the answer to HELLO
    age: bool = True  # 7: the owner refuses what is older than D
    refusal_closes: bool = True  # 8: what is not taken closes its stream
    delivery_ticks: int = 2  # D
    stale_ticks: int = 1  # S
    blocks: int = 3
    brokers: int = 2
    ticks_max: int = 12
    openings_max: int = 3
    connections_max: int = 5
    publishes_max: int = 12
    crashes_max: int = 1
    foreign_max: int = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """A pointer: `opened`, `data`, or one of another write partition. Blocks are (number, when it was first sent)."""

    kind: str
    epoch: int = 0
    batch: int = 0
    blocks: tuple[int, ...] = ()
    time: int = 0


@dataclass(slots=True)
class Flight:
    """A publish on its way: entries of one connection land in order."""

    broker: int
    connection: int
    request: int
    entry: Entry


@dataclass(slots=True)
class Batch:
    """A slot of the ring: open, stored, sent, or done."""

    number: int
    blocks: list[int]
    state: str = "open"


@dataclass(slots=True)
class Request:
    """A publish whose answer its owner waits for; `batch` is -1 for `opened`."""

    number: int
    batch: int
    handed_over: int


@dataclass(slots=True)
class Broker:
    """One broker: idle, claimed, opening, or owner."""

    state: str = "idle"
    epoch: int = 0
    read_to: int = 0
    proof: int = 0
    unread: bool = False
    queued: set[int] = field(default_factory=set)  # blocks that the queue holds, as far as it has read
    ring: list[Batch] = field(default_factory=list)
    batches: int = 0
    requests: list[Request] = field(default_factory=list)
    connection: int = 0  # to the queue
    answers: list[tuple[int, int]] = field(default_factory=list)  # request, offset; -1: refused
    reading: tuple[int, int] | None = None  # handed over, end


@dataclass(slots=True)
class Connection:
    """A producer's connection to one broker: what flies up and down, and both ends' clocks."""

    broker: int
    up: list[tuple[str, int, int]]  # what, block, age
    down: list[tuple[str, int]] = field(default_factory=list)  # what, block
    zero: int = 0
    broker_zero: int = 0
    ready: bool = False
    open: bool = True
    taken: bool = True  # the broker takes what comes on it
    pending: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Block:
    """What its producer knows of a block: not sent, sent, acked, given up."""

    first_sent: int = -1
    state: str = "open"

"""The parts of the ownership model: one write partition, its queue, brokers that own it in turn, and its producers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Role:
    """A producer of a schedule: instances of one name share their source, and each has content of its own."""

    source: int  # its producer id
    blocks: int = 3
    acks_one: bool = False  # it asks for acks=1, the others for acks=all
    instance: int = 0  # of a named producer, from 1 on


Cast = tuple[Role, ...]
ALL = Role(0)
ONE = Role(1, blocks=2, acks_one=True)
NAME = (Role(2, blocks=2, instance=1), Role(2, blocks=2, instance=2))
CASTS: tuple[Cast, ...] = ((ALL,), (ONE,), NAME, (ALL, ONE, *NAME))  # with fewer producers each gets further


@dataclass(frozen=True, slots=True)
class Rules:
    """Which rules hold, all of them by default, and the bounds of one schedule. Times are in ticks."""

    opened: bool = True  # 1: a higher epoch is announced before it is used
    tail: bool = True  # 1: an opening rebuilds what the queue holds
    names: bool = True  # 2: what is known of a name is remembered for longer than W
    window_ticks: int = 4  # W, at least D + 2 S
    read_between: bool = True  # 3: what came between the own pointers is read
    proof_at_hand_over: bool = True  # 3: and not when its answer is read
    refuse: bool = True  # 4: the queue refuses what is older than S
    skip: bool = True  # 4: what the queue holds is left out
    one_in_flight: bool = True  # 4
    late_acks: bool = True  # 4: a copy is acked when what it copies is in the queue
    whole_ring: bool = True  # 5: a batch is never passed over
    end_epoch: bool = True  # 5: a ring that is given up ends its epoch
    hold: bool = True  # 5: what was acked with 1 is held when its epoch ends
    hold_copies: bool = True  # 5: also where the ack was for a copy of what the ring has
    stamp_at_read: bool = True  # 5: the first-sent time is that of the read, and not when it is forwarded
    hold_until_shown: bool = True  # 5: and not until another owner took it
    again_when_refused: bool = True  # 5: what is refused is read for and stamped again
    oldest_first: bool = True  # 7: unacked blocks are sent again in order
    clock_after_hello: bool = True  # 7: the producer's clock starts when it has read the answer to HELLO
    age: bool = True  # 7: the owner refuses what is older than D
    refusal_closes: bool = True  # 8: what is not taken closes its stream
    alone: bool = True  # 11: an instance begins when no pointer of an earlier owner can land any more
    ring_without: bool = True  # 11: and when no block of its name is in the ring
    stated: bool = True  # 11: and when the queue shows that it begins
    fence: bool = True  # 11: older instances write nothing
    delivery_ticks: int = 2  # D
    stale_ticks: int = 1  # S
    casts: tuple[Cast, ...] = CASTS  # a schedule draws one of them
    brokers: int = 2
    ticks_max: int = 12
    openings_max: int = 3
    connections_max: int = 5  # of each client
    publishes_max: int = 12
    crashes_max: int = 1
    foreign_max: int = 3


@dataclass(slots=True, eq=False)
class Block:
    """One block: its content, and what its producer knows of it: open, acked, given up.

    Brokers know copies by `key`. Two instances of a name may write different blocks under one key.
    """

    source: int
    sequence: int
    instance: int = 0
    first_sent: int = -1
    state: str = "open"
    key: tuple[int, int] = (0, 0)
    acked_by: dict[int, bool] = field(default_factory=dict)  # with 1, by which brokers; False: lost in a crash

    def __post_init__(self) -> None:
        self.key = (self.source, self.sequence)

    def __repr__(self) -> str:
        return f"{self.source}.{self.sequence}" + (f" of {self.instance}" if self.instance else "")


@dataclass(frozen=True, slots=True)
class Entry:
    """A pointer: `opened`, `data`, or one of another write partition. `name`: which instance begins, and from where."""

    kind: str
    epoch: int = 0
    batch: int = 0
    blocks: tuple[Block, ...] = ()
    time: int = 0
    name: Name | None = None


@dataclass(frozen=True, slots=True)
class Name:
    """The record of a named producer: its newest instance, and the sequence after its last."""

    source: int
    instance: int = 0
    next: int = 0


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
    blocks: list[Block]
    state: str = "open"


@dataclass(slots=True)
class Request:
    """A publish whose answer its owner waits for; `batch` is -1 for `opened`."""

    number: int
    batch: int
    handed_over: int


@dataclass(slots=True)
class Beginning:
    """An instance of a name that asks to begin; `offset` is that of the `opened` which says so."""

    connection: Connection
    role: Role
    offset: int = -1


@dataclass(slots=True)
class Broker:
    """One epoch of one broker: idle, claimed, opening, or owner."""

    state: str = "idle"
    epoch: int = 0
    owned: int = 0  # since when it is the owner
    read_to: int = 0
    proof: int = 0
    handed_over: int = -99  # its last publish
    unread: bool = False
    queued: set[tuple[int, int]] = field(default_factory=set)  # what the queue holds, as far as it has read
    names: dict[int, Name] = field(default_factory=dict)
    beginning: Beginning | None = None
    ring: list[Batch] = field(default_factory=list)
    promised: set[Block] = field(default_factory=set)  # acked with 1
    batches: int = 0
    requests: list[Request] = field(default_factory=list)
    connection: int = 0  # to the queue
    answers: list[tuple[int, int]] = field(default_factory=list)  # request, offset; -1: refused
    reading: tuple[int, int] | None = None  # handed over, end

    def learn(self, name: Name) -> None:
        """Take a statement on a name, in any order; all below its end is in the queue."""
        known = self.names.get(name.source, name)
        next_ = max(known.next, name.next)
        self.names[name.source] = Name(name.source, max(known.instance, name.instance), next_)
        self.queued.update((name.source, sequence) for sequence in range(next_))

    def meet(self, entry: Entry) -> None:
        """Take what a pointer says."""
        self.queued.update([block.key for block in entry.blocks])
        self.meet_names(entry)

    def meet_names(self, entry: Entry) -> None:
        """Take what a pointer says of names."""
        for block in entry.blocks:
            if block.instance:
                self.learn(Name(block.source, block.instance, block.sequence + 1))
        if entry.name is not None:
            self.learn(entry.name)

    def holds(self, source: int) -> bool:
        """Whether a block of a source is in the ring."""
        return any(block.source == source for batch in self.ring for block in batch.blocks)

    def holds_older(self, role: Role) -> bool:
        """Whether a block of an older instance is in the ring."""
        blocks = [block for batch in self.ring for block in batch.blocks]
        return any(block.source == role.source and block.instance < role.instance for block in blocks)


@dataclass(slots=True)
class Client:
    """Sends blocks on one connection at a time."""

    connection: Connection | None = None
    connects: int = 0


@dataclass(slots=True)
class Producer(Client):
    """Sends its blocks in order. An instance of a name has them when it has begun."""

    role: Role = ALL
    blocks: list[Block] = field(default_factory=list)
    next: int = 0  # the place of the block that it sends next on its connection
    fenced: bool = False

    def begin(self, first: int) -> None:
        """Make the blocks, from a sequence on."""
        role = self.role
        self.blocks = [Block(role.source, first + place, role.instance) for place in range(role.blocks)]

    def open_blocks(self) -> list[Block]:
        """Return the blocks that are neither acked nor given up."""
        return [block for block in self.blocks if block.state == "open"]


@dataclass(slots=True)
class Forwarder(Client):
    """A broker's blocks of lost epochs that were acked with 1; those on disk survive a crash."""

    held: list[Block] = field(default_factory=list)
    settled: int = -1  # from the tick after it on no publish of those epochs can land
    absent: int | None = None  # when the queue was read and held none of them


@dataclass(slots=True)
class Connection:
    """A connection of a client to one broker: what flies up and down, and both ends' clocks."""

    broker: int
    client: Client
    zero: int
    ready: bool
    up: list[tuple[str, Block | None, int]] = field(default_factory=list)  # what, block, age
    down: list[tuple[str, Block | None, int]] = field(default_factory=list)  # what, block, first sequence
    broker_zero: int = 0
    taken: bool = True  # the broker takes what comes on it
    pending: list[Block] = field(default_factory=list)

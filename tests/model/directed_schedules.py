"""Written schedules for rules that random ones break too seldom: each lists allowed steps.

Three rules are not left out anywhere, since the others imply them:

- *Published again without reading the tail.* All tries of a batch bear the queue time of one proof p, until a read, or
  a publish that followed on what its owner had read, gives another. A try of before lands until p + S, or is refused.
  The look-back of W > 2 S from any entry that lies between two such copies begins before p, so a reader knows the
  first one; so does the next owner. The rule keeps copies out and totals exact, which the monitor checks
  (docs/ownership.md, rule 4).
- *Acks of another stream count.* An ack says that all blocks are in the queue that came on its stream up to a number.
  A block that is open now was open when that stream began, so it was sent on it before every later one (rule 7) and
  was not passed over (rule 8). The ack is true on whichever stream it is heard.
- *Forwarded before the last publish is older than S.* The queue was read at t, and did not show a publish that was
  handed over with a proof p <= t. It lands until p + S, so p > t - S. The next owner takes a copy until t + D, and
  publishes it with a proof q >= t - S. It leaves the copy out if the original landed before q: it knows all entries
  from t + D - W <= t - 2 S on. Otherwise the original lands after q, so p > q - S. Then p and q differ by S at most,
  and a reader that starts between the two knows the first. The rule keeps copies out, which the monitor checks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.model.ownership import Model
from tests.model.parts import ALL, NAME, ONE, Cast, Rules
from tests.model.possible_steps import Action

A, B = 0, 1  # the brokers; A has a spool
TICK: Action = ("tick", 0, 0)
SEND: Action = ("send", 0, 0)
FORWARDER_B = 2  # as a client, next to one producer
FOREIGN: Action = ("foreign", 0, 0)


@dataclass(frozen=True, slots=True)
class Directed:
    """The rules without one of them, and the steps that break a promise then; with all rules they break none."""

    without: Rules
    steps: tuple[Action, ...]

    @property
    def rules(self) -> Rules:
        """All rules, in the same bounds."""
        usual, bounds = Rules(), ("casts", "connections_max", "publishes_max")
        return replace(usual, **{name: getattr(self.without, name) for name in bounds})


def follow(rules: Rules, steps: tuple[Action, ...]) -> int:
    """Take the steps as far as the rules allow, check the end, and return how many were taken.

    Raises: BrokenPromiseError.
    """
    model, taken = Model(rules, rules.casts[0]), 0
    for step in steps:
        if step not in model.actions():
            break
        model.step(step)
        taken += 1
    model.check()
    return taken


def blocks(count: int) -> tuple[Cast, ...]:
    """Return one producer with as many blocks."""
    return ((replace(ALL, blocks=count),),)


def opens(broker: int) -> tuple[Action, ...]:
    """Open the partition."""
    return ("claim", broker, 0), ("open", broker, 0), ("land", 0, 0), ("answer", broker, 0)


def connects(broker: int, connection: int, client: int = 0) -> tuple[Action, ...]:
    """Connect a client, the producer if it is not named; HELLO is answered at once."""
    return ("connect", broker, client), ("take", broker, connection), ("hear", client, 0)


def reconnects(broker: int, connection: int) -> tuple[Action, ...]:
    """Connect the producer, which had a connection."""
    return ("reconnect", *connects(broker, connection)[0][1:]), *connects(broker, connection)[1:]


def begins(broker: int, connection: int, client: int) -> tuple[Action, ...]:
    """Connect an instance of a name, which begins at once."""
    connected = connects(broker, connection, client)
    said = ("state", broker, 0), ("land", 0, 0), ("answer", broker, 0), ("hear", client, 0)
    return *connected, ("take", broker, connection), *said


def takes(broker: int, connection: int) -> tuple[Action, ...]:
    """Send the next block; the owner stores it as a batch of its own."""
    return SEND, ("take", broker, connection), ("store", broker, 0)


def publishes(broker: int) -> tuple[Action, ...]:
    """Publish the head; it lands and is answered."""
    return ("publish", broker, 0), ("land", 0, 0), ("answer", broker, 0)


def reads(broker: int) -> tuple[Action, ...]:
    """Read to the end."""
    return ("read", broker, 0), ("read answer", broker, 0)


def two_at_both(connection: int) -> tuple[Action, ...]:
    """Send two blocks to A, which keeps them, and again to B, which publishes them; the producer hears B's ack."""
    return (
        *(reconnects(A, connection) if connection else connects(A, connection)),
        *takes(A, connection) * 2,
        *reconnects(B, connection + 1),
        *takes(B, connection + 1) * 2,
        *publishes(B) * 2,
        *(("hear", 0, 0),) * 2,
    )


DIRECTED: dict[str, Directed] = {
    # A never meets B's `opened`, since it does not read. It publishes a block each tick, and each answer dates its
    # proof. The fifth is a copy of what B published longer than W ago.
    "what came between is not read": Directed(
        replace(Rules(), read_between=False, casts=blocks(6), connections_max=6, publishes_max=13),
        (
            *opens(A),
            *opens(B),
            *two_at_both(0),
            *two_at_both(2),
            *two_at_both(4),
            *(TICK, *publishes(A)) * 4,
            TICK,
            FOREIGN,
            *publishes(A),
        ),
    ),
    # B has the block in its ring when A's pointer lands late. It keeps it until A's pointer is older than W.
    "nothing is left out at publishing": Directed(
        replace(Rules(), skip=False, casts=blocks(1)),
        (
            *opens(A),
            *connects(A, 0),
            *takes(A, 0),
            ("publish", A, 0),
            ("claim", B, 0),
            ("open", B, 0),
            ("land", 1, 0),
            ("answer", B, 0),
            *reconnects(B, 1),
            *takes(B, 1),
            ("land", 0, 0),
            *(TICK,) * 6,
            *reads(B),
            FOREIGN,
            *publishes(B),
        ),
    ),
    # The first batch is dropped after an error, the second one lands. The producer sends both again: the first is new.
    "a batch passed over after an error": Directed(
        replace(Rules(), whole_ring=False, casts=blocks(2)),
        (
            *opens(A),
            *connects(A, 0),
            *takes(A, 0) * 2,
            ("publish", A, 0),
            ("drop", 0, 0),
            ("time out", A, 0),
            *reads(A),
            *publishes(A),
            *reconnects(A, 1),
            *takes(A, 1),
            SEND,
            ("take", A, 1),
            *publishes(A),
            ("hear", 0, 0),
        ),
    ),
    # HELLO and the block wait on their way to B for six ticks. By the clock of that connection the block is new.
    "clock started before HELLO is answered": Directed(
        replace(Rules(), clock_after_hello=False, casts=blocks(1)),
        (
            *opens(A),
            *connects(A, 0),
            *takes(A, 0),
            *publishes(A),
            ("reconnect", B, 0),
            SEND,
            *(TICK,) * 6,
            *opens(B),
            ("take", B, 1),
            ("take", B, 1),
            ("store", B, 0),
            *publishes(B),
        ),
    ),
    # B brings to A what it acked with 1. A acks a copy of it with 1, and B dies: A alone has it.
    "a copy that was acked with 1 is not held": Directed(
        replace(Rules(), hold_copies=False, casts=((ONE,),)),
        (
            *opens(B),
            *connects(B, 0),
            SEND,
            ("take", B, 0),
            ("give up ring", B, 0),
            *opens(A),
            TICK,
            TICK,
            *connects(A, 1, FORWARDER_B),
            ("look", B, 0),
            ("send", FORWARDER_B, 0),
            ("take", A, 1),
            *reconnects(A, 2),
            SEND,
            ("take", A, 2),
            ("crash", B, 0),
            ("give up ring", A, 0),
        ),
    ),
    # B reads that the block is absent, and sleeps. The producer sends it to A, which publishes it. B opens W later.
    "stamped when it is forwarded": Directed(
        replace(Rules(), stamp_at_read=False, casts=((ONE,),)),
        (
            *opens(B),
            *connects(B, 0),
            SEND,
            ("take", B, 0),
            ("give up ring", B, 0),
            TICK,
            TICK,
            *connects(B, 1, FORWARDER_B),
            ("look", B, 0),
            *opens(A),
            *reconnects(A, 2),
            *takes(A, 2),
            *publishes(A),
            *(TICK,) * 5,
            *opens(B),
            ("send", FORWARDER_B, 0),
            ("take", B, 1),
            ("store", B, 0),
            *publishes(B),
        ),
    ),
    # The older instance's block is on its way to the queue when B opens. The newer one begins before it has landed.
    "an instance begins before late pointers can land": Directed(
        replace(Rules(), alone=False, casts=(NAME,)),
        (
            *opens(A),
            *begins(A, 0, 0),
            *takes(A, 0),
            ("publish", A, 0),
            ("claim", B, 0),
            ("open", B, 0),
            ("land", 1, 0),
            ("answer", B, 0),
            *connects(B, 1, 1),
            ("take", B, 1),
            ("state", B, 0),
            ("land", 1, 0),
            ("answer", B, 0),
            ("hear", 1, 0),
            ("land", 0, 0),
            ("send", 1, 0),
            ("take", B, 1),
            ("store", B, 0),
            *publishes(B),
            *reads(B),
            ("hear", 1, 0),
        ),
    ),
}

"""The state log: the replicated log of a service partition. Promise: each answer is in the log.

A service partition is one read partition of an internal topic. Its owner hosts *machines*: deterministic state that
changes by decisions only. Each decision is in the log before its answer goes out, and every later owner has exactly
the same state. The log alone decides, without clocks. docs/state-log.md has the rules S1 to S9.

`fold.py` (S1), `opening.py` (S2) and `owner.py` (S3 to S8) decide; `state_log.py` and `snapshot_store.py` act.
`machine_format.py` has the bytes of each machine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

from memq.errors import NotReadyError, OutcomeUnknownError

Answer = object


class StateMachine(Protocol):
    """State that is a function of the decisions in the log.

    Promises: `apply` is total and deterministic. It reads no clock and draws no numbers: times, random numbers and ids
    are in the decision (S3). Its answer says what the decision did in the state that all earlier decisions made, also
    that it did nothing. An invalid decision does nothing: it stays in the log, so an error would stop each later owner.
    Raises: UnsupportedFormatError for a decision or a state of a newer version; `restore` raises CorruptDataError.
    After an error the machine is not used any more.
    """

    def apply(self, body: bytes) -> Answer:
        """Change the state by one decision, and return its answer."""
        ...

    def snapshot(self) -> bytes:
        """Return the whole state. `restore` with these bytes gives a machine that behaves the same.

        No bytes: the state is the empty one. Then a snapshot does not name the machine, and brokers of a release
        without this machine can read it.
        """
        ...

    def restore(self, state: bytes) -> None:
        """Replace the state, which is empty, by one that `snapshot` returned."""
        ...


@runtime_checkable
class SlicedMachine(Protocol):
    """A machine whose state may be large: the owner does other work while it encodes a snapshot."""

    def begin_snapshot(self) -> Iterator[bytes]:
        """Return the pieces of the whole state of this moment; some are empty.

        Decisions that are applied between two pieces do not change them.
        """
        ...


@runtime_checkable
class SlicedOpening(Protocol):
    """A machine whose state may be large: the opener of a log does other work while it reads a snapshot."""

    def begin_restore(self, state: bytes) -> Iterator[None]:
        """Return the steps of `restore`. The machine is not used before their end."""
        ...


Machines = Callable[[], Mapping[str, StateMachine]]  # makes all machines of a log, with empty states


async def known_outcome(work: Awaitable[Answer]) -> Answer:
    """Return the answer of a proposal or a proof, for services whose callers may repeat each request.

    Raises: NotReadyError for an unknown outcome, so that the caller asks again, perhaps the next owner.
    """
    try:
        return await work
    except OutcomeUnknownError as error:
        raise NotReadyError(f"the outcome is unknown: {error}") from error

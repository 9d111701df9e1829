"""Validated settings of a listener, and its decision after each call of the handler. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from memq.client.arguments import check_number, check_seconds, check_switch
from memq.client.consumer.settings import ConsumerSettings
from memq.client.listener.answers import AFTER_S_MAX, DeadLetter, HandlerAnswer, Park, Retry, cause_of
from memq.client.listener.retry_records import LetterState, letters_topic, retry_topic
from memq.errors import InvalidRequestError, InvalidSettingError

# Delays between the 16 attempts of a record, in s.
RETRY_DELAYS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 600, 900, 1_800, 3_600, 5_400, 7_200)
DELAYS_MAX = 1_000
CONCURRENCY_MAX = 10_000
WhenFailing = Literal["dead-letter", "block", "park"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """The settings of one listener. `consumer` has those of its reads; its topics are those of the user."""

    consumer: ConsumerSettings
    group: str
    concurrency: int = 1
    ordered: bool = False
    when_failing: WhenFailing = "dead-letter"
    retry_delays_s: tuple[float, ...] = RETRY_DELAYS_S
    drain_s: float = 30.0

    @property
    def tries(self) -> int:
        """How often the handler is called for a record, if no answer says otherwise."""
        return len(self.retry_delays_s) + 1

    def check(self) -> ListenerSettings:
        """Return itself when the values hold.

        Raises: InvalidSettingError, InvalidRequestError, InvalidNameError.
        """
        self.consumer.check()
        letters = letters_topic(self.group)  # the longer name
        own = retry_topic(self.group)
        if own in self.consumer.topics:
            raise InvalidRequestError(
                f"topic '{own}' is the retry topic of group '{self.group}'",
                hint="name only the original topics; a listener reads its retry topic by itself",
            )
        if letters in self.consumer.topics:
            raise InvalidRequestError(
                f"topic '{letters}' has the dead letters of group '{self.group}', which would come again without end",
                hint="handle them in another group, or send them back with memq dlq redrive",
            )
        check_number("concurrency", self.concurrency, 1, CONCURRENCY_MAX, int)
        check_seconds("drain_s", self.drain_s, 0, 86_400)
        check_switch("ordered", self.ordered)
        if self.when_failing not in get_args(WhenFailing):
            raise InvalidSettingError(f"when_failing = {self.when_failing!r} is not 'dead-letter', 'block' or 'park'")
        if self.when_failing != "dead-letter" and not self.ordered:
            raise InvalidSettingError(
                f"when_failing = '{self.when_failing}' needs ordered=True",
                hint="without an order, a record that always fails becomes a dead letter",
            )
        if len(self.retry_delays_s) > DELAYS_MAX:
            raise InvalidSettingError(f"retry_delays_s has {len(self.retry_delays_s)} delays, {DELAYS_MAX} are allowed")
        for delay_s in self.retry_delays_s:
            check_seconds("retry_delays_s", delay_s, 0, AFTER_S_MAX)
        return self


def delays_of(delays: Sequence[float] | None) -> tuple[float, ...]:
    """Return the table of delays. Raises: TypeError."""
    if delays is None:
        return RETRY_DELAYS_S
    if isinstance(delays, str | bytes) or not isinstance(delays, Sequence):
        raise TypeError(f"retry_delays_s must be a sequence of seconds, not {type(delays).__name__}")
    return tuple(delays)


@dataclass(frozen=True, slots=True)
class Again:
    """The handler is to be called again, `delay_s` later."""

    delay_s: float
    error: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The record becomes a dead letter; with `parks_key`, later records of its key, too."""

    state: LetterState
    cause: str
    parks_key: bool = False


def outcome_of(answer: object, attempt: int, settings: ListenerSettings) -> Again | GivenUp | None:
    """Return the next step after the answer of a handler, or its exception; None: the record is done.

    `attempt` counts the calls for the record.
    """
    if isinstance(answer, type) and issubclass(answer, HandlerAnswer):
        answer = answer()
    if not isinstance(answer, BaseException):
        return None
    if isinstance(answer, Park):
        return GivenUp("parked", answer.reason or "parked by the handler")
    if isinstance(answer, DeadLetter):
        return GivenUp("dead", answer.reason or "given up by the handler")
    cause = cause_of(answer)
    after = None
    if isinstance(answer, Retry):
        cause, after = answer.reason or "the handler asked for a retry", answer.after
    blocks = settings.when_failing == "block"
    if attempt >= settings.tries and not blocks:
        parks = settings.when_failing == "park"
        return GivenUp("parked" if parks else "dead", cause, parks_key=parks)
    delays = settings.retry_delays_s or (1.0,)
    return Again(delays[min(attempt, len(delays)) - 1] if after is None else after, cause)

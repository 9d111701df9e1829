"""Limits as machines: the long rate is exact, a burst is bounded, observe only counts, shares follow the owners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.broker.ingest import quotas
from memq.broker.ingest.quotas import (
    CLIENTS_MAX,
    ClientLimits,
    Limiter,
    Quotas,
    RatePerSecond,
    TokenBucket,
    client_limits,
    parse_limit,
    refusal_of,
    room_of,
)
from memq.errors import InvalidNameError, InvalidSettingError
from memq.topic import LimitMode, Topic, TopicSettings, equal_slots
from tests.contract.manual_clock import ManualClock

MIB = 1 << 20
steps = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 8 * MIB)), max_size=60)


@given(st.integers(1, 10 * MIB), steps)
def test_over_any_time_no_more_passes_than_the_rate_a_second_and_a_block(
    rate: int, arrivals: list[tuple[float, int]]
) -> None:
    limiter = Limiter("topic", "t", RatePerSecond("soft", bytes_s=rate), 0.0)
    now_s, taken, largest = 0.0, 0, 0
    for pause_s, size in arrivals:
        now_s += pause_s
        if limiter.refusal(now_s) is None:
            limiter.take(1, size)
            taken += size
            largest = max(largest, size)
    assert taken <= rate * (now_s + 1) + largest


@given(st.integers(1, 10 * MIB), steps)
def test_client_that_waits_for_retry_after_finds_room(rate: int, arrivals: list[tuple[float, int]]) -> None:
    limiter = Limiter("topic", "t", RatePerSecond("hard", bytes_s=rate, requests_s=100), 0.0)
    now_s = 0.0
    for pause_s, size in arrivals:
        now_s += pause_s
        refusal = limiter.refusal(now_s)
        if refusal is not None:
            now_s += refusal.retry_after_ms / 1000
            assert limiter.refusal(now_s) is None
        limiter.take(1, size)


def test_an_error_says_who_what_and_when() -> None:
    limiter = Limiter("client", "loader", RatePerSecond("hard", bytes_s=1_000, requests_s=5), 0.0)
    limiter.take(1, 3_000)
    refusal = limiter.refusal(0.0)
    assert refusal is not None
    assert str(refusal) == "client 'loader' is over its limit of 1000 bytes/s and 5 requests/s"
    assert refusal.retry_after_ms == 2_100
    assert refusal.hint == "try again in 2100 ms, send less, or have the limit of the client raised"
    assert limiter.over == {"observe": 0, "soft": 0, "hard": 1}


def test_the_last_request_and_the_last_byte_come_in_and_an_answer_counts_as_bytes() -> None:
    limiter = Limiter("topic", "t", RatePerSecond("hard", bytes_s=1_000, requests_s=5), 0.0)
    limiter.take(4, 999)
    assert limiter.room(0.0) == (1, 1)
    assert limiter.refusal(0.0) is None
    limiter.owe(1)
    assert limiter.room(0.0) == (0, 0)
    assert limiter.refusal(0.0) is not None


@pytest.mark.parametrize(("taken", "over"), [(999, 0), (1_000, 1)])
def test_the_dark_counts_from_the_last_byte_on(taken: int, over: int) -> None:
    limiter = Limiter("topic", "t", RatePerSecond("observe", bytes_s=1_000), 0.0)
    limiter.take(1, taken)
    limiter.take(1, 1)
    assert limiter.over["observe"] == over


def test_requests_count_as_well_as_bytes() -> None:
    limiter = Limiter("topic", "t", RatePerSecond("soft", requests_s=3), 0.0)
    assert limiter.room(0.0)[0] == 3
    limiter.take(3, MIB)
    assert limiter.room(0.0) == (0, 0)
    assert limiter.room(1.0)[0] == 3


def test_the_dark_only_counts_what_would_have_been_refused() -> None:
    observed, hard = (Limiter("topic", "t", RatePerSecond(mode, bytes_s=1_000), 0.0) for mode in ("observe", "hard"))
    refused = 0
    for number in range(200):
        now_s = number / 100
        assert observed.room(now_s)[0] > 0
        assert observed.refusal(now_s) is None
        observed.take(1, 100)
        if hard.refusal(now_s) is None:
            hard.take(1, 100)
        else:
            refused += 1
    assert observed.over["observe"] == hard.over["hard"] == refused > 100


def test_of_several_limits_the_strictest_speaks() -> None:
    modes: tuple[LimitMode, ...] = ("soft", "hard", "observe")
    limiters = [Limiter("topic", mode, RatePerSecond(mode, bytes_s=1_000), 0.0) for mode in modes]
    assert room_of(limiters, 0.0)[1] == 1_000
    for limiter, size in zip(limiters, (9_000, 2_000, 99_000), strict=True):
        limiter.take(1, size)
    found = refusal_of(limiters, 0.0)
    assert found is not None
    assert (found.hard, found.error.retry_after_ms) == (True, 1_100)
    assert room_of(limiters, 0.0) == (0, 0)


def test_a_changed_limit_holds_at_once_and_debts_stay() -> None:
    bucket = TokenBucket(100.0, 0.0)
    bucket.take(300.0)
    bucket.change(1_000.0, 0.0)
    assert bucket.refill(0.0) == -200.0
    assert bucket.refill(0.2) == 0.0
    limiter = Limiter("topic", "t", RatePerSecond("hard", bytes_s=1), 0.0)
    limiter.take(1, 1_000_000)
    limiter.change(RatePerSecond("hard", requests_s=10), 1.0, 0.0)
    assert limiter.refusal(0.0) is None


# ---- the book ------------------------------------------------------------------------------------


def limited(name: str, partitions: int, **settings: object) -> Topic:
    number = sum(name.encode())
    return Topic(
        name=name,
        id=f"{number:032x}",
        created_ms=0,
        settings=TopicSettings(**settings).check(),  # type: ignore[arg-type]  # the struct checks them
        partitions=equal_slots(partitions),
    )


def test_a_topics_limit_is_shared_by_the_partitions_that_are_owned() -> None:
    clock = ManualClock()
    book = Quotas(clock, ClientLimits())
    topic = limited("clicks", 4, limit_mode="soft", limit_bytes_s=4_000)
    other, elsewhere = limited("views", 1), limited("away", 1, limit_mode="soft", limit_bytes_s=4_000)
    book.follow([other, elsewhere, topic], [(topic.id, 0), (other.id, 0)])
    assert (book.of_topic(other.id), book.of_topic(elsewhere.id)) == ((), ())
    (limiter,) = book.of_topic(topic.id)
    assert limiter.room(clock.monotonic())[1] == 1_000
    limiter.take(1, 500)
    book.follow([topic], [(topic.id, number) for number in range(4)])
    assert book.of_topic(topic.id) == (limiter,), "what it counted and owes goes on"
    clock.advance(10_000)
    assert limiter.room(clock.monotonic())[1] == 4_000
    book.follow([topic], [])
    assert book.of_topic(topic.id) == ()


def test_a_client_that_comes_again_meets_its_debts() -> None:
    clock = ManualClock()
    book = Quotas(clock, ClientLimits(RatePerSecond(), {"loader": RatePerSecond("hard", bytes_s=10)}))
    assert book.connect("unlimited") == ()
    (limiter,) = book.connect("loader")
    limiter.take(1, 1_000)
    book.disconnect("loader")
    book.disconnect("unlimited")
    assert book.connect("loader") == (limiter,)


def test_clients_that_left_are_forgotten_when_there_are_too_many() -> None:
    book = Quotas(ManualClock(), ClientLimits(RatePerSecond("soft", requests_s=1)))
    for number in range(3 * CLIENTS_MAX):
        book.connect(f"client-{number}")
        if number:
            book.disconnect(f"client-{number}")
    assert len(book.limiters()) <= CLIENTS_MAX
    assert "client-0" in [limiter.name for limiter in book.limiters()], "it is still connected"


def test_clients_are_forgotten_only_when_they_left_and_one_more_would_be_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "CLIENTS_MAX", 3)
    book = Quotas(ManualClock(), ClientLimits(RatePerSecond("soft", requests_s=1)))
    for name in ("a", "b", "c"):
        book.connect(name)
        book.disconnect(name)
    assert [limiter.name for limiter in book.limiters()] == ["a", "b", "c"]
    book.connect("b")
    book.connect("d")
    assert [limiter.name for limiter in book.limiters()] == ["b", "d"]


def test_clients_with_a_limit_are_listed_with_what_they_had() -> None:
    clock, hard = ManualClock(), RatePerSecond("hard", requests_s=1)
    default, never = RatePerSecond("soft", requests_s=1), RatePerSecond("observe", bytes_s=9)
    book = Quotas(clock, ClientLimits(default, {"never": never, "loader": hard}))
    (limiter,) = book.connect("loader")
    book.connect("loader")
    book.connect("any")
    limiter.take(1, 0)
    for _ in range(3):
        assert limiter.refusal(clock.monotonic()) is not None
    assert book.clients() == [
        ("default", default, 0, 0),
        ("any", default, 1, 0),
        ("loader", hard, 2, 3),
        ("never", never, 0, 0),
    ]
    book.disconnect("loader")
    assert book.clients()[2] == ("loader", hard, 1, 3)


# ---- settings ------------------------------------------------------------------------------------


def test_limits_of_clients_are_read() -> None:
    lines = {"default": "soft 10MiB/s 500/s", "loader": "hard 1MB/s", "nightly": "off", "probe": "observe 20/s"}
    limits = client_limits({name: (line, "memq.toml") for name, line in lines.items()})
    assert limits.of("anybody") == RatePerSecond("soft", 10 * MIB, 500)
    assert limits.of("loader") == RatePerSecond("hard", 1_000_000)
    assert limits.of("nightly") == RatePerSecond()
    assert limits.of("probe") == RatePerSecond("observe", 0, 20)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "limit = '' begins with no mode"),
        ("sotf 1MiB/s", "limit = 'sotf 1MiB/s' begins with no mode"),
        ("soft", "limit = 'soft' limits nothing"),
        ("off 1MiB/s", "limit = 'off 1MiB/s' limits nothing"),
        ("hard 1MiB", "limit = 'hard 1MiB' can't be read at '1MiB'"),
        ("hard 1MiB/s 2MiB/s", "limit = 'hard 1MiB/s 2MiB/s' can't be read at '2MiB/s'"),
        ("hard 0/s", "limit = 'hard 0/s' can't be read at '0/s'"),
        ("hard 500/m", "limit = 'hard 500/m' can't be read at '500/m'"),
        ("hard 500/", "limit = 'hard 500/' can't be read at '500/'"),
    ],
)
def test_a_bad_limit_is_named(line: str, message: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        parse_limit(line)
    assert str(caught.value) == message


HOW = "write it as 'soft 10MiB/s 500/s': a mode, then bytes or requests per second, or both"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("sotf 1MiB/s", "did you mean 'soft'?"),
        ("xyz 1MiB/s", HOW),
        ("hard 1MiB", HOW),
        ("hard", f"{HOW}; or 'off' alone"),
    ],
)
def test_a_bad_limit_comes_with_what_to_write(line: str, hint: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        parse_limit(line)
    assert caught.value.hint == hint


def test_a_bad_client_id_is_named() -> None:
    with pytest.raises(InvalidNameError, match="client name 'a b' is not allowed"):
        client_limits({"a b": ("soft 1/s", "memq.toml")})


def test_a_topic_with_a_mode_needs_a_limit() -> None:
    with pytest.raises(InvalidSettingError, match="setting limit_mode = hard limits nothing"):
        TopicSettings(limit_mode="hard").check()


@pytest.mark.parametrize(
    ("limit", "holds"),
    [
        (RatePerSecond(), False),
        (RatePerSecond("off", bytes_s=5, requests_s=5), False),
        (RatePerSecond("observe"), False),
        (RatePerSecond("observe", bytes_s=1), True),
        (RatePerSecond("soft", requests_s=1), True),
        (RatePerSecond("hard", bytes_s=1, requests_s=1), True),
    ],
)
def test_a_limit_is_watched_when_it_has_a_mode_and_a_rate(limit: RatePerSecond, *, holds: bool) -> None:
    assert limit.holds is holds

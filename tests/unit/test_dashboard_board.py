"""The machines of the dashboard: the board and its versions, rates, lags, and the columns of a topic's history."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memq.audit.dashboard import stream as board_module
from memq.audit.dashboard.history import MINUTES, SPANS, LagHistory, MinuteColumns, TopicRates, first_minute, sampled
from memq.audit.dashboard.stream import Board, BoardKey, BoardUpdate
from memq.audit.dashboard.view import About, TopicRow
from memq.topic import Totals
from tests.dashboards import stored_minute

MINUTE_MS = 60_000


def row(name: str, lag: int = 0) -> TopicRow:
    return TopicRow(name=name, partitions=1, lag_records=lag)


def follow(seen: dict[BoardKey, object], changes: BoardUpdate) -> dict[BoardKey, object]:
    """Return what a browser has after the changes."""
    seen = {} if changes.whole else dict(seen)
    for place, value in changes.values:
        if value is None:
            seen.pop(place, None)
        else:
            seen[place] = value
    return seen


steps = st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(0, 2), st.booleans()), max_size=40)


@given(steps, st.integers(0, 3))
def test_follower_of_the_changes_has_the_content_of_the_board(
    steps: list[tuple[str, int | None, bool]], kept: int
) -> None:
    board, version = Board(), 0
    seen: dict[BoardKey, object] = {}
    before, board_module.GONE_MAX = board_module.GONE_MAX, kept
    try:
        for key, lag, looks in steps:
            if lag is not None or board.get("topic", key) is not None:
                board.put("topic", key, None if lag is None else row(key, lag))
            if looks:
                changes = board.since(version)
                seen, version = follow(seen, changes), changes.version
        seen = follow(seen, board.since(version))
    finally:
        board_module.GONE_MAX = before
    assert seen == dict(board.since(0).values)


def test_an_update_costs_what_changed() -> None:
    board = Board()
    for number in range(1_000):
        board.put("topic", str(number), row(str(number)))
    version = board.version
    board.put("topic", "7", row("7", lag=1))
    board.put("topic", "8", row("8"))  # as it was
    assert board.since(version) == BoardUpdate(version + 1, False, ((("topic", "7"), row("7", lag=1)),))
    board.put_all("topic", {"7": row("7", lag=1)})
    assert len(board.since(version + 1).values) == 999
    about = About(cluster="c", audited=False, acknowledge=False, contents=False)
    board.put("about", "", about)
    assert dict(board.since(0).values) == {("topic", "7"): row("7", lag=1), ("about", ""): about}


def test_a_version_of_the_future_is_another_process_and_gets_everything() -> None:
    board = Board()
    board.put("topic", "a", row("a"))
    assert board.since(99).whole


def test_a_rate_takes_two_looks_and_before_the_first_one_nothing_is_known() -> None:
    rates, minute = TopicRates(), 1_000
    rates.take("t", "id", {0: Totals(100, 1_000), 1: Totals(0, 0)}, 0, minute * MINUTE_MS)
    assert rates.records_s("t") is None
    assert rates.records_s("other") is None
    rates.take("t", "id", {0: Totals(150, 2_000), 1: Totals(10, 50)}, 2_000, minute * MINUTE_MS)
    assert (rates.records_s("t"), rates.bytes_s("t"), rates.total("t", 0)) == (30.0, 525.0, 150)
    rates.take("t", "id", {0: Totals(151, 2_000), 1: Totals(10, 50)}, 4_000, (minute + 1) * MINUTE_MS)
    assert rates.minutes("t", minute - 1, 3) == {0: [None, 50, 1], 1: [None, 10, 0]}
    assert rates.spark("t", minute + 1)[-3:] == (None, 60, 1)
    rates.repeat_last("t", 5_000, (minute + 2) * MINUTE_MS)
    assert (rates.records_s("t"), rates.bytes_s("t"), rates.total("t", 0)) == (0.0, 0.0, 151)
    assert rates.spark("t", minute + 2)[-3:] == (60, 1, 0)
    rates.take("t", "other", {0: Totals(3, 30)}, 6_000, (minute + 1) * MINUTE_MS)  # created again under its name
    assert rates.records_s("t") is None
    rates.keep({})
    assert rates.spark("t", minute) == ()


def test_a_replica_that_lags_erases_no_history_and_no_rate_shows_its_records_twice() -> None:
    """A total below the last one was taken for a topic that was created again: its last hour was gone."""
    rates, minute = TopicRates(), 1_000
    for number, records in enumerate((100, 150, 120, 160)):
        totals = {0: Totals(records, records * 10), 1: Totals(7, 70)}
        rates.take("t", "id", totals, number * 2_000, (minute + number) * MINUTE_MS)
        assert rates.total("t", 0) == max(records, 150 if number == 2 else 0)
        assert rates.records_s("t") == (None, 25.0, 0.0, 5.0)[number]
    assert rates.minutes("t", minute, 4) == {0: [0, 50, 0, 10], 1: [0, 0, 0, 0]}


def test_lags_are_those_that_were_looked_at() -> None:
    lags = LagHistory()
    for minute, records in ((100, 5), (100, 9), (103, 2)):
        lags.take("t", "g", minute, records)
    assert lags.columns("t", "g", 98, 8, 1) == (None, None, 9, None, None, 2, None, None)
    assert lags.columns("t", "g", 98, 8, 4) == (9, 2)
    assert lags.columns("t", "other", 98, 4, 1) == (None,) * 4
    lags.take("t", "g", 103 + MINUTES, 1)  # a day later nothing of the first one is left
    assert lags.columns("t", "g", 100, 4, 1) == (None,) * 4
    assert lags.columns("t", "g", 103 + MINUTES, 1, 1) == (1,)
    lags.keep({})
    assert lags.columns("t", "g", 103 + MINUTES, 1, 1) == (None,)


def test_minutes_are_folded_into_columns_and_the_gravest_word_holds() -> None:
    first = first_minute(10_000, 360)
    assert first % 5 == 0
    assert first + 355 <= 10_000 < first + 360
    rows = [
        stored_minute(0, first, {"sent": 5, "committed": 5}, {"committed": {3: 5}}),
        stored_minute(1, first + 1, {"sent": 7, "committed": 6, "lost": 1}, {"committed": {4: 6}}),
        stored_minute(0, first, {"fetched": 5, "processed": 4}, side="g"),
        stored_minute(0, first, {"processed": 3}, side="other"),
        stored_minute(0, first + 360, {"sent": 99}),
    ]
    columns = MinuteColumns(first, 360, "g")
    for row in rows:
        columns.take(row)
    history = columns.history([0, 1])
    counts = {name: history.counts[name][0] for name in ("sent", "committed", "lost", "fetched", "processed")}
    assert counts == {"sent": 12, "committed": 11, "lost": 1, "fetched": 5, "processed": 4}
    assert (history.words[0], history.words[1], len(history.words)) == ("lost", None, 72)
    assert history.counts["sent"][1] is None  # nothing is known, which is not 0
    assert (history.heat[0][0], history.heat[1][0], history.heat[0][1]) == (5, 6, None)
    assert history.marks == {1: {0: "lost"}}
    p50, _, p99 = history.latency_ms["committed"][0] or (0, 0, 0)
    assert 4 <= p50 <= 16
    assert 8 <= p99 <= 16


def test_without_an_audit_only_what_is_committed_is_known() -> None:
    history = sampled({0: [None, 1, 2] * 20, 1: [None, 3, 0] * 20, 2: [None] * 60}, 0, 60)
    assert history.counts == {"committed": (None,) * 60}  # as long as one partition is not known, their sum is not
    history = sampled({0: [None, 1, 2] * 480, 1: [None, 3, 0] * 480}, 0, 1440)
    assert history.counts["committed"] == (30,) * (1440 // SPANS[1440])
    assert history.words == (None,) * 96

"""docs/events.md has every event of the log with its levels, compared with the code."""

from __future__ import annotations

from tests.event_docs import documented, logged


def test_the_page_has_a_level_that_is_logged() -> None:
    code = logged()
    wrong = {name: level for name, level in documented().items() if level not in code[name]}
    assert not wrong

"""The rules of staged commits find a batch that is not there, and accept that a refused one is given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.format.staged_manifest import Manifest
from tests.simulation.checked_log import Log
from tests.simulation.staged_rules import StagedRules

BATCH = cast(Manifest, cast(Any, SimpleNamespace(objects=[SimpleNamespace(key="key")])))


@pytest.mark.parametrize("given_up", [False, True])
def test_a_commit_of_rows_that_are_not_there_is_found_unless_their_writer_gave_them_up(*, given_up: bool) -> None:
    """An id below the writer's last one counts as committed, also that of a batch that was refused as too old."""
    log = Log()
    log.open(1)
    rules = StagedRules(log.checker, log.findings.append)
    rules.staged("key", [rules.made("w", 1, 0, b"")])
    if given_up:
        rules.given_up("w", 1)
    rules.committed("w", 1, BATCH)
    assert [words.partition("is acked, ")[2] for words in log.findings] == (
        [] if given_up else ["but no pointer in the queue holds it"]
    )

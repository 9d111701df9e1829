"""Processes that tests start: a start that its servers did not answer is made again, any other one is a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from memq.cli.run import UNREACHABLE, USAGE
from tests.memq_process import MemqProcess

READY_FROM = """
import sys
from pathlib import Path
starts = Path(sys.argv[1])
with starts.open("a") as file:
    file.write("+")
if len(starts.read_text()) < int(sys.argv[2]):
    sys.exit("refused" if sys.argv[3] == "1" else int(sys.argv[3]))
print("memq ready: here", flush=True)
sys.stdin.read()
"""


class Refused(MemqProcess):
    """Ends with a code at each start before the one with this number."""

    def __init__(self, folder: Path, ready_at: int, code: int) -> None:
        super().__init__(folder / "log")
        self.starts = folder / "starts"
        self._arguments = [str(self.starts), str(ready_at), str(code)]

    def command(self) -> list[str]:
        """See `MemqProcess.command`."""
        return ["-c", READY_FROM, *self._arguments]


def started(process: Refused, limit_s: float) -> int:
    """Start it, and return how many starts that took."""
    process.launch()
    try:
        process.become_ready(limit_s)
    finally:
        process.close()
    return len(process.starts.read_text())


def test_a_broker_whose_servers_did_not_answer_is_started_again(tmp_path: Path) -> None:
    assert started(Refused(tmp_path, 3, UNREACHABLE), 60) == 3


@pytest.mark.parametrize(("code", "limit_s"), [(UNREACHABLE, 0), (USAGE, 60), (1, 60)])
def test_a_broker_that_is_out_of_time_or_was_refused_for_good_fails_with_its_log(
    tmp_path: Path, code: int, limit_s: float
) -> None:
    process = Refused(tmp_path, 3, code)
    with pytest.raises(AssertionError, match=rf"exit code {code}; log:\n{'refused' if code == 1 else ''}"):
        started(process, limit_s)
    assert len(process.starts.read_text()) == 1

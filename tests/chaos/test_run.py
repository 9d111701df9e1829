"""A chaos run on real servers: 100 seconds in `make check`, an hour for each of three seeds in `make soak`.

The short run has a seed whose plan has 24 faults of 20 kinds, every kind of kill among them.

On a machine that also runs other tests only the judge's findings count: nothing acked is lost, doubled, damaged or out
of order. A soak has the machine to itself, so there every finding counts, also that a group catches up in time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.plan import draw_plan
from tests.chaos.run import FOUND
from tests.soak import SOAKING, repetitions, report, seconds

RECORDS_LEAST = 5_000  # far fewer than a calm run acks; a run in which nothing works must not pass
RECORDS_S = 300
SEED = 3 if SOAKING else 1652
KINDS_LEAST = 20  # of faults; few seeds have so many in a short run
SHORT_S = 100.0
SERVERS_AND_JUDGE_S = 600


@pytest.mark.soak
def test_nothing_acked_is_lost_doubled_or_reordered_whatever_fails(tmp_path: Path) -> None:
    minutes = seconds(few=SHORT_S, many=3_600) / 60
    for seed in range(SEED, SEED + repetitions(few=1, many=3)):
        assert len({fault.kind for fault in draw_plan(seed, minutes * 60)}) >= KINDS_LEAST
        folder = tmp_path / str(seed)
        command = [sys.executable, "-m", "tests.chaos.run", "--minutes", str(minutes), "--seed", str(seed)]
        command += ["--rate", str(RECORDS_S), "--folder", str(folder)]
        limit_s = minutes * 60 + SERVERS_AND_JUDGE_S
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
        said = done.stdout[-6_000:] + done.stderr[-4_000:]
        assert done.returncode == 0 or (done.returncode == FOUND and not SOAKING), said
        assert (folder / "verdict.json").exists(), said
        verdict = json.loads((folder / "verdict.json").read_text())
        counts = verdict["counts"]
        assert verdict["findings"] == [], said
        assert counts["records acked"] >= RECORDS_LEAST, counts
        assert counts["commits"] > 0, counts
        report(f"chaos, seed {seed}, {minutes:g} minutes: {counts['records acked']} records acked, none lost")

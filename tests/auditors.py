"""`memq auditor` as a real process, and the content of its state as its commands print it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.memq_process import END_TIMEOUT_S, MemqProcess


class AuditorProcess(MemqProcess):
    """One auditor of the cluster at `brokers`; started again it continues with its `state`. Its log is NAME.log.

    It is ready when the first round is done.
    """

    ready = "memq auditing: "

    def __init__(self, folder: Path, name: str, brokers: str, state: str) -> None:
        super().__init__(folder / f"{name}.log")
        self.state = state
        self._brokers = brokers

    def command(self) -> list[str]:
        """Return what Python is given to start it."""
        return ["-m", "memq", "auditor", "-b", self._brokers, "--audit-state", self.state, "--dashboard-port", "-1"]

    def findings(self) -> list[dict[str, Any]]:
        """Return what `memq auditor findings --json` prints: what holds and is grave."""
        found: list[dict[str, Any]] = self._said("findings", "--json")
        return found

    def topic(self, name: str) -> dict[str, Any]:
        """Return what `memq auditor show --json` prints of a topic, over the last hour; nothing while it knows none."""
        found: list[dict[str, Any]] = self._said("show", "--json")
        return next((each for each in found if each["topic"] == name), {})

    def _said(self, *arguments: str) -> Any:
        command = [sys.executable, "-m", "memq", "auditor", *arguments, "--audit-state", self.state]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=END_TIMEOUT_S)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return json.loads(done.stdout)

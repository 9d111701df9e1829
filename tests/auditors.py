"""`memq auditor` as a real process, and what its state holds as its commands print it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from localstack import guard
from localstack.processes import identity_of

END_TIMEOUT_S = 60.0
# One state is of one group of auditors: those of another state read all reports for themselves.
_OTHER_GROUP = """
import sys
import memq.cli.live_audit
memq.cli.live_audit.AUDIT_GROUP = {!r}
from memq.cli import main
sys.exit(main())
"""


class AuditorProcess:
    """One auditor of the cluster at `brokers`; started again it goes on with its `state`. Its log is NAME.log."""

    def __init__(self, folder: Path, name: str, brokers: str, state: str, *, group: str = "") -> None:
        self.state = state
        self.log = folder / f"{name}.log"
        start = ["-c", _OTHER_GROUP.format(group)] if group else ["-m", "memq.cli"]
        self._command = [sys.executable, *start, "auditor", "-b", brokers, "--audit-state", state]
        self._command += ["--dashboard-port", "-1"]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start, and wait until the first round is done."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start."""
        with self.log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, text=True)
        guard.watch(identity_of(self._process.pid))

    def wait_ready(self) -> None:
        """Wait for the ready line."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("memq auditing: "), f"no ready line but {line!r}; log:\n{self.log.read_text()}"

    def pause(self) -> None:
        """Let it stand still, as a machine does that is frozen."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as `kill -9` does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(END_TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def close(self) -> None:
        """End what still runs."""
        if self._process is not None and self._process.returncode is None:
            self.kill()

    def findings(self) -> list[dict[str, Any]]:
        """Return what `memq auditor findings --json` prints: what holds and is grave."""
        found: list[dict[str, Any]] = self._said("findings", "--json")
        return found

    def topic(self, name: str) -> dict[str, Any]:
        """Return what `memq auditor show --json` prints of a topic, over the last hour; nothing while it knows none."""
        found: list[dict[str, Any]] = self._said("show", "--json")
        return next((each for each in found if each["topic"] == name), {})

    def _said(self, *arguments: str) -> Any:
        command = [sys.executable, "-m", "memq.cli", "auditor", *arguments, "--audit-state", self.state]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=END_TIMEOUT_S)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return json.loads(done.stdout)

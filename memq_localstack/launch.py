"""Starts one server, and returns a handle: wait for its ready line, stop, kill, pause, resume, restart.

Another process can stop or restart the server by the file `server.json` in the server's folder; the log is next to
it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from memq_localstack import LocalstackError, guard
from memq_localstack.ports import answers
from memq_localstack.processes import LOOK_EVERY_S, Identity, identity_of

READY_TIMEOUT_S = 240.0  # Kafka takes 4 s on two idle cores, and more than 90 s at load 40
KILL_TIMEOUT_S = 10.0
TAIL_LINES = 15
LOG_CHARACTERS_MAX = 1_000_000  # of one start, kept until it is ready
IN_USE = re.compile(r"already in use", re.IGNORECASE)  # Java and Go say so with different capitals


@dataclass(frozen=True, slots=True)
class Launch:
    """What starts a server, and by what it shows that it is ready."""

    kind: str  # "kafka", "zookeeper", "s3"
    command: tuple[str, ...]
    address: str  # HOST:PORT, as clients want it
    ports: tuple[int, ...]  # all that it listens on, the clients' first
    ready: tuple[str, ...]  # texts that its log holds when it is ready, each; none: its port takes connections then
    environment: dict[str, str] = field(default_factory=dict)  # beside what this process has
    stop_signal: int = signal.SIGTERM
    stop_timeout_s: float = 20.0
    leftovers: tuple[str, ...] = ()  # files outside the folder that a killed server leaves behind
    details: dict[str, str] = field(default_factory=dict)  # what clients need beside the address


@dataclass(frozen=True, slots=True)
class Saved:
    """What `server.json` holds."""

    launch: Launch
    identity: Identity | None


class Server:
    """A handle on one server; it may have been started by another process."""

    def __init__(self, folder: Path, launch: Launch, identity: Identity | None = None) -> None:
        self.folder = folder
        self.launch = launch
        self._identity = identity
        self._child: subprocess.Popen[bytes] | None = None  # set when this process started it, and must reap it

    # ---- what it is --------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self.launch.address

    @property
    def log(self) -> Path:
        """Where stdout and stderr of the server go, of all its starts."""
        return self.folder / "log"

    @property
    def pid(self) -> int:
        """The process id of the last start; 0 when there was none, or it was stopped."""
        return self._identity.pid if self._identity else 0

    @property
    def running(self) -> bool:
        """Whether the process is there; a paused one is."""
        return self._identity is not None and self._identity.lives

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the end of the log."""
        if not self.log.exists():
            return ""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    # ---- what it does ------------------------------------------------------------------------

    def start(self, timeout_s: float = READY_TIMEOUT_S) -> Self:
        """Start the server and wait until it is ready.

        Raises:
            LocalstackError: it ended before that, or took longer; the message has the end of its log. The process is
                gone then.
        """
        if self.running:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            begin = log.tell()
            self._child = subprocess.Popen(
                self.launch.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **self.launch.environment},
                start_new_session=True,  # a Ctrl-C in the terminal is for the launcher, not for the servers
            )
        self._identity = identity_of(self._child.pid)
        guard.watch(self._identity)
        try:
            self.save()
            self._wait_ready(begin, timeout_s)
        except BaseException:  # also Ctrl-C: what is not handed over does not stay
            self.kill()
            raise
        return self

    def _wait_ready(self, begin: int, timeout_s: float) -> None:
        """Read the log from byte `begin` on until it says that the server is ready."""
        said, deadline = "", time.monotonic() + timeout_s
        with self.log.open("r", encoding="utf-8", errors="replace") as log:
            log.seek(begin)
            while True:
                gone = not self.running  # before the last read, so that nothing it said is overlooked
                said = (said + log.read())[-LOG_CHARACTERS_MAX:]
                if not gone and self._is_ready(said):
                    return
                if gone or time.monotonic() > deadline:
                    why = "ended" if gone else f"was not ready after {timeout_s:.0f} s"
                    raise NotReadyError(
                        f"{self.launch.kind} at {self.address} {why}; its log {self.log} ends with:\n{self.tail()}"
                    )
                time.sleep(LOOK_EVERY_S)

    def _is_ready(self, said: str) -> bool:
        if self.launch.ready:
            return all(text in said for text in self.launch.ready)
        return answers(self.launch.ports[0])

    def stop(self) -> None:
        """End the server as its operator would; what does not end in time is killed."""
        if self._identity is not None and self._identity.send(signal.Signals(self.launch.stop_signal)):
            self._identity.send(signal.SIGCONT)  # a paused process takes no other signal
            self._wait_end(self.launch.stop_timeout_s)
        self.kill()
        self._identity = None  # it was stopped, not lost: `server.json` says so, too
        if self.folder.exists():
            self.save()

    def kill(self) -> None:
        """End the process at once, by SIGKILL, and wait until it is gone."""
        if self._identity is not None and self._identity.send(signal.SIGKILL):
            self._wait_end(KILL_TIMEOUT_S)
        if self._child is not None:
            self._child.wait()
            self._child = None
        for path in self.launch.leftovers:
            Path(path).unlink(missing_ok=True)

    def _wait_end(self, timeout_s: float) -> None:
        assert self._identity is not None, "only what was started ends"
        self._identity.wait_gone(timeout_s)

    def pause(self) -> None:
        """Stop the process where it is (SIGSTOP), and wait until it stands: its connections stay open and silent."""
        if self._identity is None or not self._identity.pause():
            raise self._not_running()

    def resume(self) -> None:
        """Let a paused process go on."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        if self._identity is None or not self._identity.send(number):
            raise self._not_running()

    def _not_running(self) -> LocalstackError:
        return LocalstackError(f"{self.launch.kind} at {self.address} does not run", hint="start it first")

    def restart(self, timeout_s: float = READY_TIMEOUT_S) -> Self:
        """Start the server again on the same data and the same port; one that runs is stopped first."""
        self.stop()
        return self.start(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- for other processes -----------------------------------------------------------------

    def save(self) -> None:
        """Write `server.json`, from which `load` makes a handle in another process."""
        draft = self.folder / "server.json.new"
        draft.write_bytes(msgspec.json.encode(Saved(self.launch, self._identity)))
        draft.replace(self.folder / "server.json")

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Return a handle on the server that was started in that folder, None when none was."""
        try:
            saved = msgspec.json.decode((folder / "server.json").read_bytes(), type=Saved)
        except FileNotFoundError:
            return None
        return cls(folder, saved.launch, saved.identity)


class NotReadyError(LocalstackError):
    """A server ended before it was ready, or was not ready in time."""

    @property
    def port_taken(self) -> bool:
        """Whether it ended because somebody else has one of its ports."""
        return IN_USE.search(str(self)) is not None

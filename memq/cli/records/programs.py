"""Programs that handle records or items: content on stdin, an exit code as the answer."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import click

from memq.cli.options import milliseconds_of
from memq.client.listener.answers import AFTER_S_MAX, DeadLetter, Park, Retry
from memq.client.listener.settings import DELAYS_MAX
from memq.errors import InvalidSettingError
from memq.format.blocks.columns import RecordHeaders

DEAD, TEMPORARY, PARKED = 65, 75, 79  # exit codes of a program; the first two are those of sysexits.h
VARIABLE_BYTES_MAX = 64 << 10  # of a variable of the environment; Linux allows 128 KiB
TAIL_BYTES = 4_096  # of stderr, in which the last line is searched
STDERR_S = 1.0  # a process that the program left behind may hold its stderr open
CHUNK_BYTES = 64 << 10
DAY_S = 86_400


class Handling(Protocol):
    """A listener or a worker on an event loop."""

    async def run(self) -> None:
        """Work until `stop` or an error."""
        ...

    def stop(self) -> None:
        """Let `run` return."""
        ...


async def handle_until_signal(handling: Handling, programs: Programs) -> signal.Signals | None:
    """Work until a signal; return it. A second signal kills the programs."""
    loop, stopped = asyncio.get_running_loop(), list[signal.Signals]()

    def stop(number: signal.Signals) -> None:
        if stopped:
            programs.kill()
        stopped.append(number)
        handling.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    await handling.run()
    return stopped[0] if stopped else None


def programs_of(command: Sequence[str], timeout: str | None) -> Programs:
    """Return the programs of a command line. Raises: click.UsageError, InvalidSettingError."""
    if shutil.which(command[0]) is None:
        raise click.UsageError(f"no program '{command[0]}' in PATH")
    limit_s = None if timeout is None else seconds_of("--timeout", timeout)
    if limit_s == 0:
        raise InvalidSettingError(f"--timeout {timeout!a} leaves a program no time", hint="write more, as 30s")
    return Programs(command, limit_s)


class Programs:
    """Runs the program once for each record or item, in a session of its own: Ctrl-C does not reach it."""

    def __init__(self, command: Sequence[str], limit_s: float | None) -> None:
        self._command = command
        self._limit_s = limit_s
        self._running: dict[int, None] = {}
        self._killed = False

    async def run(self, content: bytes, environment: Mapping[str, str | bytes]) -> object:
        """Run the program with this content on stdin; return its answer.

        Raises: OSError if it can't be started.
        """
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stderr is not None
        self._running[process.pid] = None
        tail = bytearray()
        loop = asyncio.get_running_loop()
        feeding = loop.create_task(_feed(process.stdin, content), name="stdin of a program")
        printing = loop.create_task(_print_on(process.stderr, tail), name="stderr of a program")
        try:
            async with asyncio.timeout(self._limit_s):
                code = await process.wait()
            await asyncio.wait((printing,), timeout=STDERR_S)
        except TimeoutError:
            return Retry(reason=f"no answer after {self._limit_s:g} s")
        finally:
            _kill(process.pid)  # also what it started
            del self._running[process.pid]
            for task in (feeding, printing):
                task.cancel()
        if self._killed:
            return Retry(after=0, reason="memq was stopped")
        return answer_of(code, bytes(tail))

    def kill(self) -> None:
        """Kill all that run. Their records are retried at once."""
        self._killed = True
        for pid in self._running:
            _kill(pid)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def answer_of(code: int, stderr: bytes) -> object:
    """Return the answer for an exit code and the end of stderr."""
    lines = [line for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""
    if code == 0:
        return None
    if code == DEAD:
        return DeadLetter(last or f"exit code {code}")
    if code == PARKED:
        return Park(last)
    if code == TEMPORARY:
        return Retry(reason=last or f"exit code {code}")
    what = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Retry(reason=f"{what}: {last}" if last else what)


async def _feed(stdin: asyncio.StreamWriter, value: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the program need not read it
        stdin.write(value)
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()


async def _print_on(stderr: asyncio.StreamReader, tail: bytearray) -> None:
    """Print stderr as it comes, and keep its end."""
    while chunk := await stderr.read(CHUNK_BYTES):
        tail += chunk
        del tail[:-TAIL_BYTES]
        sys.stderr.buffer.write(chunk)
        sys.stderr.buffer.flush()


def program_environment(
    prefix: str, headers_prefix: str, headers: RecordHeaders, fields: Mapping[str, str | bytes | None]
) -> Mapping[str, str | bytes]:
    """Return the environment of a program: that of this process, and fields with a prefix.

    Fields that no variable can hold are left out: those with a zero byte, or with more than 64 KiB.
    """
    found: dict[str, str | bytes | None] = {
        f"{headers_prefix}{re.sub(r'[^A-Z0-9]', '_', name.upper())}": value for name, value in reversed(headers)
    }
    found |= {f"{prefix}{name}": value for name, value in fields.items()}
    given = {name: value for name, value in os.environ.items() if not name.startswith(prefix)}
    return given | {name: value for name, value in found.items() if value is not None and _fits(value)}


def _fits(value: str | bytes) -> bool:
    content = os.fsencode(value)
    return b"\0" not in content and len(content) <= VARIABLE_BYTES_MAX


def delays_of(text: str) -> list[float]:
    """Return the delays of `--delays`. Raises: InvalidSettingError."""
    parts = [part for part in text.split(",") if part.strip()]
    if len(parts) > DELAYS_MAX:
        raise InvalidSettingError(f"--delays has {len(parts)} times, {DELAYS_MAX} are allowed", hint="write fewer")
    return [seconds_of("--delays", part, AFTER_S_MAX) for part in parts]


def seconds_of(option: str, text: str, most_s: float = DAY_S) -> float:
    """Return a time with its unit in seconds. Raises: InvalidSettingError."""
    found = milliseconds_of(option, text) / 1000
    if found > most_s:
        what = f"{option} {text.strip()[:60]!a} is over the limit of {most_s / DAY_S:g} days"
        raise InvalidSettingError(what, hint="write less")
    return found

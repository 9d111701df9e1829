"""`memq listen`: runs a program for each record of a group."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import click

from memq.cli.commands import INTERRUPTED
from memq.cli.options import milliseconds_of, s3_values, setting_options, settings_of
from memq.cli.output import print_message
from memq.client.listener.answers import AFTER_S_MAX, DeadLetter, Message, Park, Retry
from memq.client.listener.core import ListenerStats
from memq.client.listener.listener import AsyncListener
from memq.client.listener.settings import CONCURRENCY_MAX, DELAYS_MAX, RETRY_DELAYS_S, WhenFailing
from memq.errors import InvalidSettingError
from memq.settings import Value

DEAD, TEMPORARY, PARKED = 65, 75, 79  # exit codes of a program; the first two are those of sysexits.h
VARIABLE_BYTES_MAX = 64 << 10  # of a variable of the environment; Linux allows 128 KiB
TAIL_BYTES = 4_096  # of stderr, in which the last line is searched
STDERR_S = 1.0  # a process that the program left behind may hold its stderr open
CHUNK_BYTES = 64 << 10
DAY_S = 86_400


@click.command()
@click.argument("topic")
@click.argument("command", nargs=-1, required=True)
@setting_options("brokers", "prefetch_bytes_max")
@click.option("-G", "--group", required=True, metavar="GROUP", help="Share the topic with the group's members.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, CONCURRENCY_MAX),
    default=1,
    metavar="N",
    help="Most programs at the same time (default 1).",
)
@click.option("--ordered", is_flag=True, help="One program at a time for each key, in the order of its records.")
@click.option(
    "--when-failing",
    type=click.Choice(["dead-letter", "block", "park"]),
    default="dead-letter",
    help="With --ordered, for a record that fails in all tries: give it up, block its key, or park its key.",
)
@click.option(
    "--delays",
    metavar="TIMES",
    help="Delays before further tries, as 1s,30s,10min; default: 15 delays from 1 s to 2 h. '' makes one try.",
)
@click.option("--timeout", metavar="TIME", help="Kill a program after this time; its record failed.")
@click.option(
    "--drain", default="30s", metavar="TIME", help="How long Ctrl-C waits for running programs (default 30s)."
)
@click.option("--tags", metavar="TAGS", help="Only records with one of these tags: 'A || B'.")
@click.option("--where", metavar="CONDITION", help="Only records with such headers.")
def listen(
    topic: str,
    command: tuple[str, ...],
    group: str,
    concurrency: int,
    ordered: bool,
    when_failing: WhenFailing,
    delays: str | None,
    timeout: str | None,
    drain: str,
    tags: str | None,
    where: str | None,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> int:
    """Run COMMAND for each record of TOPIC: memq listen TOPIC -G GROUP -- COMMAND [ARGUMENT]...

    The program gets the value on stdin, and the other fields as variables RECORD_TOPIC, RECORD_POSITION, RECORD_KEY,
    RECORD_TAG, RECORD_TIMESTAMP_MS, RECORD_ATTEMPT, RECORD_ERROR, RECORD_GROUP and RECORD_HEADER_NAME. Its exit code is
    the answer. 0: done; 75: retry; 65: dead letter; 79: park; any other code, or a signal: failed, so it is retried.
    The last line of its stderr is the reason. Ctrl-C lets running programs finish.
    """
    if when_failing != "dead-letter" and not ordered:
        raise click.UsageError(f"--when-failing {when_failing} needs --ordered")
    if shutil.which(command[0]) is None:
        raise click.UsageError(f"no program '{command[0]}' in PATH")
    found = settings_of(config, profile, **flags)
    settings = found.client()
    limit_s = None if timeout is None else _seconds("--timeout", timeout)
    if limit_s == 0:
        raise InvalidSettingError(f"--timeout {timeout!a} leaves a program no time", hint="write more, as 30s")
    programs = Programs(command, group, limit_s)
    listener = AsyncListener(
        settings.brokers,
        topic,
        group,
        programs.run,
        concurrency=concurrency,
        ordered=ordered,
        when_failing=when_failing,
        retry_delays_s=RETRY_DELAYS_S if delays is None else _delays(delays),
        drain_s=_seconds("--drain", drain),
        tags=tags,
        where=where,
        prefetch_bytes_max=settings.prefetch_bytes_max,
        s3=s3_values(found),
    )
    stopped = asyncio.run(_listen(listener, programs))
    print_message(f"memq: {_summary(listener.stats())}")
    return INTERRUPTED if stopped == signal.SIGINT else 0


async def _listen(listener: AsyncListener, programs: Programs) -> signal.Signals | None:
    """Listen until a signal; return it. A second signal kills the programs."""
    loop, stopped = asyncio.get_running_loop(), list[signal.Signals]()

    def stop(number: signal.Signals) -> None:
        if stopped:
            programs.kill()
        stopped.append(number)
        listener.stop()

    async with listener:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        await listener.run()
    return stopped[0] if stopped else None


class Programs:
    """Runs the program once for each message, in a session of its own: Ctrl-C does not reach it."""

    def __init__(self, command: Sequence[str], group: str, limit_s: float | None) -> None:
        self._command = command
        self._group = group
        self._limit_s = limit_s
        self._running: dict[int, None] = {}
        self._killed = False

    async def run(self, message: Message) -> object:
        """Run the program for a message, and return its answer. Raises: OSError if it can't be started."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=record_environment(message, self._group),
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stderr is not None
        self._running[process.pid] = None
        tail = bytearray()
        loop = asyncio.get_running_loop()
        feeding = loop.create_task(_feed(process.stdin, message.value or b""), name="value of a record")
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
            return Retry(after=0, reason="the listener was stopped")
        return answer_of(code, bytes(tail))

    def kill(self) -> None:
        """Kill all that run. Their records are retried at once, by another member or the next start."""
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


def record_environment(message: Message, group: str) -> Mapping[str, str | bytes]:
    """Return the environment of a program: that of this process, and the fields of a message.

    Fields that no variable can hold are left out: those with a zero byte, or with more than 64 KiB.
    """
    fields: dict[str, str | bytes | None] = {
        f"RECORD_HEADER_{re.sub(r'[^A-Z0-9]', '_', name.upper())}": value for name, value in reversed(message.headers)
    }
    fields |= {
        "RECORD_TOPIC": message.topic,
        "RECORD_POSITION": str(message.position),
        "RECORD_KEY": message.key,
        "RECORD_TAG": message.tag,
        "RECORD_TIMESTAMP_MS": str(message.timestamp_ms),
        "RECORD_ATTEMPT": str(message.attempt),
        "RECORD_ERROR": message.error,
        "RECORD_GROUP": group,
    }
    given = {name: value for name, value in os.environ.items() if not name.startswith("RECORD_")}
    return given | {name: value for name, value in fields.items() if value is not None and _fits(value)}


def _fits(value: str | bytes) -> bool:
    content = os.fsencode(value)
    return b"\0" not in content and len(content) <= VARIABLE_BYTES_MAX


def _delays(text: str) -> list[float]:
    """Return the delays of `--delays`. Raises: InvalidSettingError."""
    parts = [part for part in text.split(",") if part.strip()]
    if len(parts) > DELAYS_MAX:
        raise InvalidSettingError(f"--delays has {len(parts)} times, {DELAYS_MAX} are allowed", hint="write fewer")
    return [_seconds("--delays", part, AFTER_S_MAX) for part in parts]


def _seconds(option: str, text: str, most_s: float = DAY_S) -> float:
    """Return a time with its unit in seconds. Raises: InvalidSettingError."""
    found = milliseconds_of(option, text) / 1000
    if found > most_s:
        what = f"{option} {text.strip()[:60]!a} is over the limit of {most_s / DAY_S:g} days"
        raise InvalidSettingError(what, hint="write less")
    return found


def _summary(stats: ListenerStats) -> str:
    return f"{stats.done:,} done, {stats.retried:,} retried, {stats.dead_letters:,} dead, {stats.parked:,} parked"

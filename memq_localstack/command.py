"""`memq-localstack up|down|status`: real servers on this machine from a shell.

Exit codes: 0 done, 1 a server did not start or is dead, 2 a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from memq_localstack import LocalstackError
from memq_localstack.s3 import BUCKET
from memq_localstack.servers import S3Server
from memq_localstack.stack import BROKER, NAME, STARTS, Found, down, state_folder, status, up

BROKERS = 3
INTERRUPTED = 130  # what a shell reports for a program that SIGINT ended


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    unknown = [name for name in getattr(options, "servers", []) if name not in STARTS]
    if unknown:
        parser.error(f"no server is called {unknown[0]!r}; there are {', '.join(STARTS)}")
    folder: Path = options.data.absolute()
    try:
        if options.command == "up":
            brokers = options.brokers if options.brokers is not None else 0 if options.servers else BROKERS
            return _up(folder, {name: getattr(options, f"{name}_port") for name in options.servers or STARTS}, brokers)
        if options.command == "down":
            return _down(folder, purge=options.purge)
        return _status(folder, as_json=options.json)
    except OSError as error:  # the folder, or what lies in it
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"memq-localstack: error: {what} (mend that, or name another folder with --data)", file=sys.stderr)
        return 1
    except LocalstackError as error:
        print(f"memq-localstack: error: {error}" + (f" ({error.hint})" if error.hint else ""), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("memq-localstack: interrupted; what was ready stays up", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memq-localstack", description="Real Kafka, ZooKeeper and S3 on this machine."
    )
    parser.add_argument("--data", type=Path, default=state_folder(), help="folder of data and logs (%(default)s)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    starting = commands.add_parser("up", help="start what does not run, and wait until it serves")
    starting.add_argument("servers", nargs="*", metavar="SERVER", help=f"of {', '.join(STARTS)}; all")
    for name in STARTS:
        starting.add_argument(
            f"--{name}-port", type=_port, default=0, metavar="N", help="0 for a free one (%(default)s)"
        )
    starting.add_argument(
        "--brokers", type=_count, metavar="N", help=f"so many brokers ({BROKERS}; 0 when servers are named)"
    )
    ending = commands.add_parser("down", help="stop all; the data stay")
    ending.add_argument("--purge", action="store_true", help="delete the data, too")
    showing = commands.add_parser("status", help="what runs where; exit code 1 when one is dead")
    showing.add_argument("--json", action="store_true", help="as one JSON object")
    return parser


def _port(text: str) -> int:
    """Read a port; what is none must not reach the folder, which keeps its ports."""
    return _within(text, 65_535)


def _count(text: str) -> int:
    return _within(text, 1_000)


def _within(text: str, most: int) -> int:
    if not text.isdecimal() or int(text) > most:
        raise argparse.ArgumentTypeError(f"{text!r} is not within 0 to {most}")
    return int(text)


def _up(folder: Path, ports: dict[str, int], brokers: int) -> int:
    began = time.monotonic()
    for found in up(folder, ports, brokers):
        took = f"ready after {time.monotonic() - began:.1f} s" if found.began else "runs already"
        print(f"{_line(found)}  {took}", flush=True)
        began = time.monotonic()
    if (folder / NAME).exists():
        print(f"settings for further brokers: {folder / NAME}")
    addresses = [found.server.address for found in status(folder) if found.name.startswith(BROKER)]
    if addresses:
        print(f"for clients: export MEMQ_BROKERS={','.join(addresses)}")
    return 0


def _down(folder: Path, *, purge: bool) -> int:
    stopped = [found for found in down(folder, purge=purge) if _say_stopped(found)]
    if not stopped:
        print(f"nothing ran in {folder}")
    return 0


def _say_stopped(found: Found) -> bool:
    print(f"{found.name:<10} {'stopped' if found.server.running else 'was dead'}", flush=True)
    return True


def _status(folder: Path, *, as_json: bool) -> int:
    all_found = status(folder)
    if as_json:
        print(json.dumps({found.name: _facts(found) for found in all_found}))
    elif not all_found:
        print(f"nothing runs in {folder}")
    for found in all_found:
        if not as_json:
            print(_line(found))
        if found.state == "dead":
            tail = f"; its log {found.server.log} ends with:\n{found.server.tail()}"
            print(f"memq-localstack: {found.name} is dead{'' if as_json else tail}", file=sys.stderr)
    return 1 if any(found.state == "dead" for found in all_found) else 0


def _facts(found: Found) -> dict[str, object]:
    """Return what clients and people want to know of a server."""
    server = found.server
    facts: dict[str, object] = {"state": found.state, "address": server.address, "pid": server.pid}
    facts["log"] = str(server.log)
    if isinstance(server, S3Server):
        facts |= {"endpoint": server.endpoint, "region": server.region}
        facts |= {"access_key": server.access_key, "secret_key": server.secret_key, "bucket": BUCKET}
    return facts


def _line(found: Found) -> str:
    server = found.server
    line = f"{found.name:<10} {found.state:<5} {server.address:<16} pid {server.pid:<8}"
    if isinstance(server, S3Server):
        line += f" bucket {BUCKET}, key {server.access_key}, secret {server.secret_key}"
    return line

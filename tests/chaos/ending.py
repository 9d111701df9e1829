"""The end of a chaos run: heals the servers, ends the clients, reads everything once more and judges it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memq.broker.spool.files import sizes_in
from memq.runtime.clock import SystemClock
from memq_localstack.s3 import BUCKET
from tests.chaos.clients import SIZE, Client
from tests.chaos.stack import PREFIX, Stack

CLOCK = SystemClock()
COMMAND_S = 900.0  # what a command of memq may take
LAG_S = 180.0
KAFKA_S = 90.0
BAD_EVENTS = re.compile(r"\b(log-lost|given-up|pointer-damaged)\b|Traceback")


class Ending:
    """Ends the clients of a run, looks for what nothing excuses, and lets the judge read all."""

    def __init__(
        self,
        stack: Stack,
        folder: Path,
        clients: dict[str, Client],
        topics: list[str],
        say: Callable[[str], None],
        find: Callable[[str], None],
    ) -> None:
        self._stack = stack
        self._folder = folder
        self._clients = clients
        self._topics = topics
        self._say = say
        self._find = find
        self._at_end: list[str] = []  # clients that ended in order, and groups that have read all
        self._pause = threading.Event()  # never set: it paces the waits

    def end_clients(self) -> None:
        """Let producers settle what they sent, a last reader read it, and members catch up."""
        for kind in ("produce", "stage", "churn"):
            self._end(kind)
        self._wait_for_spools()
        self._say("every producer has ended and every spool is empty")
        self._end("stream")
        self._say("a last reader reads")
        reader = Client(self._folder, "reader", "read", ",".join(self._topics), self._stack.addresses)
        self._clients["reader"] = reader
        reader.begin()
        self._await(reader)
        self._say("members catch up")
        self._wait_for_members()
        self._end("consume")
        self._say("memq audits")
        for topic in self._topics:
            done = self._memq("audit", topic)
            if done.returncode:
                self._find(f"memq audit {topic}: {(done.stdout + done.stderr)[-600:]}")

    def _end(self, kind: str) -> None:
        """End clients of one kind in order."""
        clients = [client for client in self._clients.values() if client.kind == kind]
        for client in clients:
            client.end()
        for client in clients:
            self._await(client)

    def _await(self, client: Client) -> None:
        try:
            code = client.process.wait(client.end_s)
        except subprocess.TimeoutExpired:
            self._find(f"{client.name} did not end within {client.end_s:.0f} s in a healed world")
            client.kill()
            return
        if code:
            self._find(f"{client.name} ended with {code}: {client.log.read_text()[-600:]}")
        else:
            self._at_end.append(client.name)

    def _wait_for_spools(self) -> None:
        """Wait until brokers have published what they acked with 1."""
        until_s = CLOCK.monotonic() + LAG_S
        brokers = self._stack.brokers.items()
        while left := {name: sum(sizes_in(broker.spool / "spool").values()) for name, broker in brokers}:
            if not any(left.values()):
                return
            if CLOCK.monotonic() > until_s:
                self._find(f"spools hold bytes after {LAG_S:.0f} s in a healed world: {left}")
                return
            self._pause.wait(1.0)

    def _wait_for_members(self) -> None:
        """Wait until the group has read to the end, as long as it comes nearer."""
        until_s, least, said = CLOCK.monotonic() + LAG_S, -1, ""
        while CLOCK.monotonic() < until_s:
            done = self._memq("lag", "member", "--json")
            said = done.stdout[-400:] + done.stderr[-400:]
            if done.returncode == 0 and (left := behind(json.loads(done.stdout))) >= 0:
                if not left:
                    self._at_end.append("member")
                    return
                if least < 0 or left < least:
                    until_s, least = CLOCK.monotonic() + LAG_S, left
            self._pause.wait(1.0)
        self._find(f"the group did not catch up within {LAG_S:.0f} s: {said}")

    def _memq(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "memq", *arguments, "-b", self._stack.addresses]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S)
        except subprocess.TimeoutExpired as error:
            return subprocess.CompletedProcess(command, 1, "", repr(error))

    def check_logs(self) -> None:
        """Events that nothing in the plan excuses."""
        for broker in self._stack.brokers.values():
            bad = [line for line in broker.log.read_text(errors="replace").splitlines() if BAD_EVENTS.search(line)]
            if bad:
                self._find(f"{broker.name} logged {len(bad)} lines that nothing excuses, the first: {bad[0][:300]}")

    def write_run(self, copied: str, seed: int) -> None:
        """Write what the judge needs; `copied` is the topic that Spark copies."""
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self._stack.bootstrap})
        known = admin.list_topics(timeout=KAFKA_S).topics
        wanted = [name for name in known if name.startswith(tuple(f"{PREFIX}{topic}." for topic in self._topics))]
        found = self._stack.s3
        run = {
            "seed": seed, "size": SIZE, "bootstrap": self._stack.bootstrap, "kafka_topics": sorted(wanted),
            "endpoint": found.endpoint, "region": found.region, "access_key": found.access_key,
            "secret_key": found.secret_key, "bucket": BUCKET, "folder": "chaos", "copied": copied,
            "at_end": self._at_end,
        }  # fmt: skip
        (self._folder / "run.json").write_text(json.dumps(run))

    def judge(self, root: Path) -> None:
        """Let the judge read everything, and take its findings over."""
        self._say("judging")
        command = [sys.executable, "-m", "tests.chaos.judge", str(self._folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
        path = self._folder / "verdict.json"
        if not path.exists():
            self._find(f"the judge ended with {done.returncode} and without a verdict: {done.stderr[-1000:]}")
            return
        verdict = json.loads(path.read_text())
        for text in verdict["findings"]:
            self._find(text)
        self._say(f"judged: {verdict['counts']}")


def behind(lag: list[dict[str, Any]]) -> int:
    """Return by how many records `memq lag --json` says that the groups are behind; -1 when it does not know."""
    rows = [row for group in lag for row in group["partitions"]]
    found = [row["lag_records"] for row in rows]
    return -1 if None in found or not found else sum(found)

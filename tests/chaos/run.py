"""The command: `python -m tests.chaos.run --minutes 60 --seed 7` runs a plan, judges it and writes `report.md`."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import memq
from localstack import guard
from localstack.launch import NotReadyError
from localstack.s3 import BUCKET
from memq.broker.spool.files import sizes_in
from memq.clock import SystemClock
from tests.chaos.journal import lines_of
from tests.chaos.plan import Fault, draw_plan
from tests.chaos.report import write_report
from tests.chaos.stack import PREFIX, TOPIC, ChaosBroker, Stack
from tests.memq_process import MemqProcess

ROOT = Path(__file__).resolve().parents[2]
CLOCK = SystemClock()
SIZE = 100  # bytes of a value
TOPICS = {"all": 4, "quick": 3, "jobs": 2, "staged": 2}
STARTS_MAX = 3
TEXT_MAX = 600  # of a finding
STATUS_S = 10.0
CLIENTS_END_S = 300.0
LAG_S = 180.0
HEAL_S = 90.0
BAD_EVENTS = re.compile(r"\b(log-lost|given-up|pointer-damaged)\b|Traceback")


class Client(MemqProcess):
    """One worker process; each start is a life with a journal of its own."""

    def __init__(self, folder: Path, name: str, kind: str, topic: str, brokers: str, **options: object) -> None:
        super().__init__(folder / f"{name}.log")
        self.name = name
        self.kind = kind
        self.lives = 0
        self._folder = folder
        self._arguments = ["--name", name, "--topic", topic, "--brokers", brokers]
        for key, value in options.items():
            self._arguments += [f"--{key}"] if value is True else [f"--{key}", str(value)]

    def command(self) -> list[str]:
        """Return what Python is given to start it."""
        journal = self._folder / f"{self.name}.{self.lives}.journal"
        more = ["--journal", str(journal), "--life", str(self.lives), "--size", str(SIZE)]
        return ["-m", "tests.chaos.workers", self.kind, *self._arguments, *more]

    def begin(self) -> None:
        """Start a new life."""
        self.launch()
        self.lives += 1

    @property
    def runs(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None


class ChaosRun:
    """One run: servers, clients, faults, the end, the verdict."""

    def __init__(self, folder: Path, seed: int, seconds: float, rate: float, before: Path | None) -> None:
        self.folder = folder
        self.seed = seed
        self.seconds = seconds
        self.plan = draw_plan(seed, seconds)
        self.stack = Stack(folder, seed, ROOT, before)
        self.findings: list[str] = []
        self.moments: list[tuple[float, str]] = []  # when what happened, on the monotonic clock
        self.clients: dict[str, Client] = {}
        self._rate = rate
        self._before = before
        self._begun_s = 0.0
        self._struck: list[str] = []  # what a fault has in its hands; a name may be there more than once
        self._over = threading.Event()  # ends every wait
        self._acked = dict[Path, tuple[int, int]]()  # bytes read and records acked, by journal

    def run(self) -> list[str]:
        """Run the plan to its end and return the findings, those of the judge among them."""
        try:
            self.say(f"seed {self.seed}, {self.seconds:.0f} s, {len(self.plan)} faults; starting the servers")
            self._start_servers()
            os.environ["AWS_ACCESS_KEY_ID"] = self.stack.s3.access_key  # of this process and its clients
            os.environ["AWS_SECRET_ACCESS_KEY"] = self.stack.s3.secret_key
            self._create_topics()
            self._begin_clients()
            self._begun_s = CLOCK.monotonic()
            self._strike()
            self._end_clients()
            self._check_logs()
            self._write_run()
            self._judge()
        finally:
            self._over.set()
            for client in self.clients.values():
                client.close()
            self.stack.close()
        write_report(self.folder, self.seed, self.seconds, self.plan, self.findings, self.moments)
        return self.findings

    def say(self, text: str) -> None:
        """Print a line of progress."""
        at_s = CLOCK.monotonic() - self._begun_s if self._begun_s else 0.0
        print(f"chaos {at_s:7.1f} s  {text}", flush=True)

    def find(self, text: str) -> None:
        """Note a broken promise."""
        text = text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX // 2]} ... {text[-TEXT_MAX // 2 :]}"
        self.findings.append(text)
        self.say(f"FOUND {text}")

    def _start_servers(self) -> None:
        """Start the stack; again on other ports when another program was quicker at one of them."""
        for attempt in range(1, STARTS_MAX + 1):
            try:
                self.stack.start()
            except NotReadyError as error:
                if not error.port_taken or attempt == STARTS_MAX:
                    raise
                self.stack.close()
                shutil.rmtree(self.folder / f"start-{attempt}", ignore_errors=True)
                self.stack = Stack(self.folder / f"start-{attempt}", self.seed, ROOT, self._before)
            else:
                return

    # ---- begin ---------------------------------------------------------------------------------

    def _create_topics(self) -> None:
        with memq.Admin(self.stack.addresses) as admin:
            for name, partitions in TOPICS.items():
                more = {"ack1": "disk"} if name == "quick" else {}
                admin.create_topic(name, partitions=partitions, settings={**TOPIC, **more}, exist_ok=True)

    def _begin_clients(self) -> None:
        brokers, rate = self.stack.addresses, self._rate
        client = self._client
        client("all-1", "produce", "all", brokers, partitions=TOPICS["all"], rate=rate * 0.4)
        client("all-2", "produce", "all", brokers, partitions=TOPICS["all"], rate=rate * 0.3, codec="none")
        client("ack1", "produce", "quick", brokers, partitions=TOPICS["quick"], rate=rate * 0.2, acks="1")
        client("named", "produce", "jobs", brokers, partitions=TOPICS["jobs"], rate=rate * 0.1, named=True)
        client("staged", "stage", "staged", brokers, partitions=TOPICS["staged"])
        client("churn", "churn", "churn", brokers)
        for number in (1, 2, 3):
            client(f"member-{number}", "consume", ",".join(TOPICS), brokers, group="member")
        for each in self.clients.values():
            each.begin()

    def _client(self, name: str, kind: str, topic: str, brokers: str, **options: object) -> None:
        self.clients[name] = Client(self.folder, name, kind, topic, brokers, **options)

    # ---- faults --------------------------------------------------------------------------------

    def _strike(self) -> None:
        """Let every fault begin and end at its time, and print how many records are acked."""
        threads: list[threading.Thread] = []
        status_s = STATUS_S
        upgrades = list(self.stack.brokers) if self._before else []
        pending = list(self.plan)
        while (at_s := CLOCK.monotonic() - self._begun_s) < self.seconds:
            if pending and at_s >= pending[0].at_s:
                thread = threading.Thread(target=self._one, args=[pending.pop(0)], name="fault")
                thread.start()
                threads.append(thread)
            elif upgrades and at_s > self.seconds / 3:
                self._upgrade(upgrades.pop(0))
            elif at_s >= status_s:
                status_s += STATUS_S
                self.say(f"{self._count_acked()} records acked")
            else:
                self._over.wait(0.05)
            self._look_for_dead()
        for thread in threads:
            thread.join(2 * HEAL_S)
            if thread.is_alive():
                self.find("a fault does not come to its end")

    def _one(self, fault: Fault) -> None:
        self.say(f"{fault.kind} {fault.target} for {fault.lasts_s:.1f} s")
        self.moments.append((CLOCK.monotonic(), f"{fault.kind} {fault.target}"))
        struck = [*self.stack.brokers] if fault.target == "brokers" else [fault.target]
        self._struck += struck
        try:
            if fault.target in self.clients:
                self._strike_client(fault)
                return
            self.stack.begin(fault)
            self._over.wait(fault.lasts_s)
            self.stack.end(fault)
        except Exception as error:  # noqa: BLE001 - what a broker does when it is stopped and started is judged, too
            self.find(f"{fault.kind} {fault.target}: {error!r}")
        finally:
            for name in struck:
                self._struck.remove(name)

    def _strike_client(self, fault: Fault) -> None:
        client = self.clients[fault.target]
        client.pause() if fault.kind.endswith("pause") else client.kill()
        self._over.wait(fault.lasts_s)
        client.resume() if fault.kind.endswith("pause") else client.begin()

    def _upgrade(self, name: str) -> None:
        self.say(f"upgrade {name}")
        self._struck.append(name)
        try:
            self.stack.upgrade(name)
        except Exception as error:  # noqa: BLE001 - as above
            self.find(f"upgrade of {name}: {error!r}")
        finally:
            self._struck.remove(name)

    def _look_for_dead(self) -> None:
        """A broker or client that ended without a fault is a finding; it is started again."""
        for broker in self.stack.brokers.values():
            if self._ended(broker.name, broker):
                broker.come_back()
        for client in self.clients.values():
            if self._ended(client.name, client):
                client.begin()

    def _ended(self, name: str, process: MemqProcess) -> bool:
        if name in self._struck or process.process.poll() is None:
            return False
        self.find(f"{name} ended by itself with {process.process.returncode}; see {process.log}")
        return True

    def _count_acked(self) -> int:
        """Return how many records are acked so far, by what journals hold beyond the last look."""
        for path in self.folder.glob("*.journal"):
            at, records = self._acked.get(path, (0, 0))
            with path.open("rb") as file:
                file.seek(at)
                whole, _, _ = file.read().rpartition(b"\n")
            records += sum(int(line.split(b" ")[5]) for line in whole.split(b"\n") if line.startswith(b"A "))
            self._acked[path] = at + len(whole) + (1 if whole else 0), records
        return sum(records for _, records in self._acked.values())

    # ---- end -----------------------------------------------------------------------------------

    def _end_clients(self) -> None:
        """Let producers settle what they sent, a last reader read it, and members catch up."""
        self.say(f"healed; {self._count_acked()} records acked; clients end")
        writers = [client for client in self.clients.values() if client.kind != "consume"]
        self._end(writers)
        self._wait_for_spools()
        self.say("every producer has ended and every spool is empty; a last reader reads")
        reader = Client(self.folder, "reader", "read", ",".join(TOPICS), self.stack.addresses)
        self.clients["reader"] = reader
        reader.begin()
        self._await(reader, CLIENTS_END_S)
        self.say("members catch up")
        self._wait_for_members()
        self._end([client for client in self.clients.values() if client.kind == "consume"])
        self.say("memq audits")
        for topic in TOPICS:
            done = self._memq("audit", topic)
            if done.returncode:
                self.find(f"memq audit {topic}: {(done.stdout + done.stderr)[-600:]}")

    def _end(self, clients: list[Client]) -> None:
        for client in clients:
            if client.runs:
                client.signal()
        for client in clients:
            self._await(client, CLIENTS_END_S)

    def _await(self, client: Client, seconds: float) -> None:
        try:
            code = client.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.find(f"{client.name} did not end within {seconds:.0f} s in a healed world")
            client.kill()
            return
        if code:
            self.find(f"{client.name} ended with {code}: {client.log.read_text()[-600:]}")

    def _wait_for_spools(self) -> None:
        """Wait until brokers have published what they acked with 1."""
        until_s = CLOCK.monotonic() + LAG_S
        while left := {name: sum(sizes_in(broker.spool / "spool").values()) for name, broker in self._spooling()}:
            if not any(left.values()):
                return
            if CLOCK.monotonic() > until_s:
                self.find(f"spools hold bytes after {LAG_S:.0f} s in a healed world: {left}")
                return
            self._over.wait(1.0)

    def _spooling(self) -> list[tuple[str, ChaosBroker]]:
        return list(self.stack.brokers.items())

    def _wait_for_members(self) -> None:
        """Wait until the group has read to the end."""
        until_s = CLOCK.monotonic() + LAG_S
        while True:
            done = self._memq("lag", "member", "--json")
            if done.returncode == 0 and behind(json.loads(done.stdout)) == 0:
                return
            if CLOCK.monotonic() > until_s:
                break
            self._over.wait(1.0)
        self.find(f"the group did not catch up within {LAG_S:.0f} s: {done.stdout[-400:]}{done.stderr[-400:]}")

    def _memq(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "memq", *arguments, "-b", self.stack.addresses]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=CLIENTS_END_S)

    def _check_logs(self) -> None:
        """Events that nothing in the plan excuses."""
        for broker in self.stack.brokers.values():
            bad = [line for line in broker.log.read_text(errors="replace").splitlines() if BAD_EVENTS.search(line)]
            if bad:
                self.find(f"{broker.name} logged {len(bad)} lines that nothing excuses, the first: {bad[0][:300]}")

    def _write_run(self) -> None:
        """Write what the judge needs."""
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self.stack.bootstrap})
        known = admin.list_topics(timeout=HEAL_S).topics
        wanted = [name for name in known if name.startswith(tuple(f"{PREFIX}{topic}." for topic in TOPICS))]
        found = self.stack.s3
        run = {
            "seed": self.seed, "size": SIZE, "bootstrap": self.stack.bootstrap, "kafka_topics": sorted(wanted),
            "endpoint": found.endpoint, "region": found.region, "access_key": found.access_key,
            "secret_key": found.secret_key, "bucket": BUCKET, "folder": "chaos",
        }  # fmt: skip
        (self.folder / "run.json").write_text(json.dumps(run))

    def _judge(self) -> None:
        self.say("judging")
        command = [sys.executable, "-m", "tests.chaos.judge", str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode not in (0, 1):
            self.find(f"the judge ended with {done.returncode}: {done.stderr[-1000:]}")
            return
        verdict = json.loads((self.folder / "verdict.json").read_text())
        for text in verdict["findings"]:
            self.find(text)
        self.say(f"judged: {verdict['counts']}")


def behind(lag: list[dict[str, Any]]) -> int:
    """Return by how many records `memq lag --json` says that the groups are behind; -1 when it does not know."""
    rows = [row for group in lag for row in group["partitions"]]
    found = [row["lag_records"] for row in rows]
    return -1 if None in found or not found else sum(found)


def tree_of(revision: str, folder: Path) -> Path:
    """Check a revision out into a folder of its own: what brokers run before the upgrade."""
    target = folder / "before"
    archive = subprocess.run(["git", "archive", revision, "memq"], cwd=ROOT, capture_output=True, check=True)
    target.mkdir()
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
    return target


def main(arguments: list[str] | None = None) -> int:
    """Run, judge, report; 1 when there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1_000.0, help="records/s of all producers together")
    parser.add_argument("--folder", type=Path, default=Path("memq-chaos"), help="where everything goes; emptied first")
    parser.add_argument("--before", help="git revision that the brokers run until a third of the time is over")
    parser.add_argument("--plan", action="store_true", help="print the plan and end")
    options = parser.parse_args(arguments)
    if options.plan:
        for fault in draw_plan(options.seed, options.minutes * 60):
            print(json.dumps(fault.as_row()))
        return 0
    folder: Path = options.folder.resolve()
    if folder.exists():
        if any(folder.iterdir()) and not (folder / "plan.json").exists():
            raise SystemExit(f"{folder} is not a chaos run's; choose another folder with --folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    guard.begin()
    before = tree_of(options.before, folder) if options.before else None
    run = ChaosRun(folder, options.seed, options.minutes * 60, options.rate, before)
    (folder / "plan.json").write_text(json.dumps([fault.as_row() for fault in run.plan], indent=1))
    findings = run.run()
    acked = sum(int(words[5]) for path in folder.glob("*.journal") for words in lines_of(path) if words[0] == "A")
    print(f"chaos: seed {options.seed}: {acked} records acked, {len(findings)} findings; {folder / 'report.md'}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

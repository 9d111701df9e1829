"""The command: `python -m tests.chaos.run --minutes 60 --seed 7` runs a plan, judges it and writes `report.md`."""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import memq
from memq.errors import RetryableError
from memq.runtime.clock import SystemClock
from memq_localstack import guard
from memq_localstack.launch import NotReadyError
from tests.chaos.clients import Client, SparkClient
from tests.chaos.ending import Ending
from tests.chaos.journal import COPIES, lines_of
from tests.chaos.plan import BEFORE_UPGRADE, SPARK_RUN_S, Fault, draw_plan, hands_meet
from tests.chaos.report import write_report
from tests.chaos.stack import TOPIC, ChaosBroker, Stack
from tests.memq_process import MemqProcess

ROOT = Path(__file__).resolve().parents[2]
CLOCK = SystemClock()
TOPICS = {"all": 4, "quick": 3, "jobs": 2, "staged": 2}
COPIED = "all"
STARTS_MAX = 3
TEXT_MAX = 600  # of a finding
STATUS_S = 10.0
HEAL_S = 90.0
HANDS_S = 600.0  # what a fault may take longer than planned: a drain, and starts that are refused
FOUND = 3  # exit code of a run that was judged and has findings; Python ends with 1 for an exception
START_DELAY_S_MAX = 10.0  # a fault that could not begin by then is left out: many at once are not what the seed says


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
        self.left_out = collections.Counter[str]()  # faults whose part an earlier one had longer than planned
        self.loads: list[float] = []  # of the machine, over the run
        self.spark = seconds >= SPARK_RUN_S
        self.topics = {**TOPICS, COPIES: 2} if self.spark else TOPICS
        self.clients: dict[str, Client] = {}
        self._rate = rate
        self._before = before
        self._begun_s = 0.0
        self.in_hand: list[str] = []  # parts that a fault has in its hands
        self._threads: list[threading.Thread] = []  # of faults, and of brokers that are started again
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
            self.say(f"healed; {self._count_acked()} records acked; clients end")
            ending = Ending(self.stack, self.folder, self.clients, list(self.topics), self.say, self.find)
            ending.end_clients()
            ending.check_logs()
            ending.write_run(COPIED, self.seed)
            ending.judge(ROOT)
        finally:
            self._over.set()
            for client in self.clients.values():
                client.close()
            self.stack.close()
        struck = collections.Counter(fault.kind for fault in self.plan) - self.left_out
        write_report(self.folder, self.seed, self.seconds, struck, self.findings, self.moments, self.loads)
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
        """Start the stack; again on other ports when one was taken, or a server gave up on a busy machine."""
        for attempt in range(1, STARTS_MAX + 1):
            try:
                self.stack.start()
            except NotReadyError:
                if attempt == STARTS_MAX:
                    raise
                self.stack.close()
                shutil.rmtree(self.folder / f"start-{attempt}", ignore_errors=True)
                self.stack = Stack(self.folder / f"start-{attempt}", self.seed, ROOT, self._before)
            else:
                return

    # ---- begin ---------------------------------------------------------------------------------

    def _create_topics(self) -> None:
        until_s = CLOCK.monotonic() + HEAL_S
        with memq.Admin(self.stack.addresses) as admin:
            for name, partitions in self.topics.items():
                more = {"ack1": "disk"} if name == "quick" else {}
                while True:
                    try:
                        admin.create_topic(name, partitions=partitions, settings={**TOPIC, **more}, exist_ok=True)
                        break
                    except RetryableError:
                        if CLOCK.monotonic() > until_s:
                            raise

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
            client(f"member-{number}", "consume", ",".join(self.topics), brokers, group="member")
        if self.spark:
            topics = ",".join(sorted(TOPICS, key=COPIED.__ne__))  # the one that is copied is the first
            self.clients["spark"] = SparkClient(self.folder, "spark", "stream", topics, brokers)
        for each in self.clients.values():
            each.begin()

    def _client(self, name: str, kind: str, topic: str, brokers: str, **options: object) -> None:
        self.clients[name] = Client(self.folder, name, kind, topic, brokers, **options)

    # ---- faults --------------------------------------------------------------------------------

    def _strike(self) -> None:
        """Let every fault begin and end at its time, and print how many records are acked."""
        status_s = STATUS_S
        upgrades = list(self.stack.brokers) if self._before else []
        upgrading = threading.Thread()  # none yet; one after another
        pending = list(self.plan)
        while (at_s := CLOCK.monotonic() - self._begun_s) < self.seconds or upgrades or upgrading.is_alive():
            if pending and at_s >= pending[0].at_s:
                self.begin_fault(pending.pop(0), at_s)
            elif upgrades and at_s > self.seconds / 3 and not self._is_struck(upgrades[0]) and not upgrading.is_alive():
                name = upgrades.pop(0)
                upgrading = self._take_in_hand(name, f"upgrade {name}", self.stack.upgrade, name)
            elif at_s >= status_s:
                status_s += STATUS_S
                self.loads.append(os.getloadavg()[0])
                self.say(f"{self._count_acked()} records acked")
            else:
                self._over.wait(0.05)
            self._look_for_dead()
        for thread in self._threads:
            thread.join(HANDS_S)
            if thread.is_alive():
                self.find("a fault does not come to its end")

    def begin_fault(self, fault: Fault, at_s: float) -> None:
        """Begin a fault, unless its time is past, its part is still in other hands, or the part is not ready for it."""
        client = self.clients.get(fault.target)
        old = any(broker.tree != ROOT for broker in self.stack.brokers.values())
        early = (old and fault.kind not in BEFORE_UPGRADE) or (client is not None and not client.may_be_struck)
        if early or at_s > fault.at_s + START_DELAY_S_MAX or self._is_struck(fault.target):
            self.left_out[fault.kind] += 1
            self.say(f"left out: {fault.kind} {fault.target}")
            return
        self.moments.append((CLOCK.monotonic(), f"{fault.kind} {fault.target}"))
        self._take_in_hand(fault.target, f"{fault.kind} {fault.target} for {fault.lasts_s:.1f} s", self._one, fault)

    def _is_struck(self, name: str) -> bool:
        return any(hands_meet(name, other) for other in list(self.in_hand))

    def _take_in_hand(self, part: str, text: str, work: Callable[..., object], *arguments: object) -> threading.Thread:
        """Do something to a part in a thread of its own, with nothing done to that part meanwhile."""
        self.say(text)
        self.in_hand.append(part)

        def run() -> None:
            try:
                work(*arguments)
            except Exception as error:  # noqa: BLE001 - what a broker does when it is stopped and started is judged, too
                self.find(f"{text}: {error!r}")
            finally:
                self.in_hand.remove(part)

        thread = threading.Thread(target=run, name="fault")
        self._threads.append(thread)
        thread.start()
        return thread

    def _one(self, fault: Fault) -> None:
        client = self.clients.get(fault.target)
        try:
            if client is None:
                self.stack.begin(fault)
            else:
                client.pause() if fault.kind.endswith("pause") else client.kill()
            self._over.wait(fault.lasts_s)
        finally:
            if client is None:
                self.stack.end(fault)
            else:
                client.resume() if fault.kind.endswith("pause") else client.begin()

    def _look_for_dead(self) -> None:
        """A broker or client that ended without a fault is a finding; it is started again."""
        for broker in self.stack.brokers.values():
            if self._ended(broker.name, broker):
                self._take_in_hand(broker.name, f"start {broker.name} again", ChaosBroker.come_back, broker)
        for client in self.clients.values():
            if self._ended(client.name, client):
                client.begin()

    def _ended(self, name: str, process: MemqProcess) -> bool:
        if self._is_struck(name) or process.process.poll() is None:
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


def tree_of(revision: str, folder: Path) -> Path:
    """Check a revision out into a folder of its own: what brokers run before the upgrade."""
    target = folder / "before"
    archive = subprocess.run(["git", "archive", revision, "memq"], cwd=ROOT, capture_output=True, check=True)
    target.mkdir()
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
    return target


def main(arguments: list[str] | None = None) -> int:
    """Run, judge, report; return 0, or FOUND when there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=2_000.0, help="records/s of all producers together")
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
    return FOUND if findings else 0


if __name__ == "__main__":
    sys.exit(main())

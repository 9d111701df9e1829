"""Messaging on real input: filters, retries, dead letters, order, delays, transactions; programs are killed meanwhile.

Run it with `make messaging-demo`. It starts `memq dev` on a fresh folder and sends flight records. Each step uses one
feature, kills a program with SIGKILL where that matters, and compares every record with the input. At the end `memq
audit` reads the topics, and the live audit may have no finding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flights import flights
from folders import claim, clear
from messaging_workers import (
    BILLED_CARRIERS,
    FLIGHTS,
    INVOICES,
    LATE_MIN,
    LEDGER,
    NOTICED_CARRIERS,
    RETRY_DELAYS_S,
    SESSION_MS,
    read_journal,
)

import memq
from memq.audit.live.storage.database import SqliteDatabase
from memq.audit.live.view import AuditView

RECORDS = 30_000
PARTITIONS = 4
FAR = "distance > 2500 AND dest IN ('HNL', 'SFO')"
REMINDERS = "reminders"
DELAYED, CANCELLED = 1_000, 100
ORDERED_CARRIERS = "AS || F9 || HA || YV"
BROKEN_CARRIER = b"YV"  # whose first flight always fails
PROVEN = (REMINDERS, INVOICES, LEDGER)  # by units: their producers need not end
AUDITED = 5  # topics that `memq audit` reads, in as many processes at once
WAIT_S = 60.0
POLL_S = 0.05
WORKERS = Path(__file__).parent / "messaging_workers.py"


@dataclass(frozen=True, slots=True)
class Sent:
    """A flight, and the position of its record."""

    position: str
    flight: dict[str, Any]


def main() -> int:
    """Run the demo; the exit code is 0 when each step has the expected records, and the audit is clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("memq-messaging-demo"), help="data folder, emptied first")
    parser.add_argument("--records", type=int, default=RECORDS, help="send only so many")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its programs end with the demo
    with claim(options.data):
        clear(options.data)
        started = time.perf_counter()
        with ExitStack() as stack:
            broker = stack.enter_context(DevBroker(options.data).running())
            demo = MessagingDemo(broker, options.data, stack)
            demo.send(options.records)
            for step in (
                demo.choose,
                demo.retry,
                demo.keep_order,
                demo.delay,
                demo.transact,
                demo.read_history,
                demo.audit,
            ):
                step()
        print(f"every step has the expected records, after {time.perf_counter() - started:.1f} s")
    return 0


def require(condition: bool, text: str) -> None:
    """End the demo with an error unless a condition holds."""
    if not condition:
        raise SystemExit(f"memq: error: {text}")


def until(condition: Callable[[], bool], text: str) -> None:
    """Wait until a condition holds; end the demo after a minute."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        require(time.monotonic() < deadline_s, f"still not so after {WAIT_S:.0f} s: {text}")
        time.sleep(POLL_S)


class DevBroker:
    """A `memq dev` that can be killed, and that starts again on the same folder and port."""

    def __init__(self, data: Path) -> None:
        self.address = ""
        self._data = data
        self._process: subprocess.Popen[str] | None = None

    @contextmanager
    def running(self) -> Iterator[DevBroker]:
        """Run it, and end it with a drain."""
        self.start()
        try:
            yield self
        finally:
            if self._process is not None:
                self._process.terminate()
                self._process.wait()

    def start(self) -> None:
        """Start it, and wait until clients can connect."""
        port = self.address.rpartition(":")[2] or "0"
        command = [sys.executable, "-m", "memq", "dev", "--data", str(self._data), "--port", port, "--http-port", "-1"]
        with (self._data / "broker.log").open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [*command, "--dashboard-port", "-1"], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None, "stdout is a pipe"
        ready = self._process.stdout.readline()
        require(ready.startswith("memq ready: "), f"the broker did not start; see {self._data}/broker.log")
        self.address = ready.removeprefix("memq ready: ").strip()

    def kill(self) -> None:
        """Kill it with SIGKILL, and start it again."""
        assert self._process is not None, "it was started"
        self._process.kill()
        self._process.wait()
        self.start()
        print("  killed the broker with SIGKILL; it runs again", flush=True)


@dataclass
class Worker:
    """A program of `messaging_workers.py`, and the journal of its steps."""

    process: subprocess.Popen[bytes]
    journal: Path

    def steps(self) -> list[list[Any]]:
        """Return its steps so far, and those of its earlier runs."""
        return read_journal(self.journal)


@dataclass
class Handled:
    """The records that a handler of the demo has completed, in order: key and position of each."""

    done: list[tuple[bytes, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, message: memq.Message) -> None:
        """Note that a record is done."""
        with self.lock:
            self.done.append((message.key or b"", str(message.position)))

    def first_of(self, key: bytes) -> list[str]:
        """Return the positions of a key in the order of their first completion: a kill may repeat some."""
        return list(dict.fromkeys(position for found, position in self.done if found == key))


class MessagingDemo:
    """The steps of the demo. Each ends the program if a record is wrong. `stack` ends the started programs."""

    def __init__(self, broker: DevBroker, data: Path, stack: ExitStack) -> None:
        self.broker = broker
        self._data = data
        self._stack = stack
        self._flights: list[dict[str, Any]] = []

    def send(self, records: int) -> None:
        """Send flights: their carrier is key and tag, and two fields are headers."""
        address = self.broker.address
        with memq.Admin(address) as admin:
            admin.create_topic(FLIGHTS, partitions=PARTITIONS)
        with memq.Producer(address, acks="all") as producer:
            for (carrier, line), _ in zip(flights(), range(records), strict=False):
                flight = json.loads(line)
                headers = {"distance": str(flight["distance"]), "dest": flight["dest"]}
                producer.send(FLIGHTS, line, key=carrier, tag=flight["carrier"], headers=headers)
                self._flights.append(flight)
            producer.flush(timeout=WAIT_S)
        print(f"sent {len(self._flights):,} flights, with carriers as keys and tags", flush=True)

    # ---- filters ---------------------------------------------------------------------------------

    def choose(self) -> None:
        """Choose records by tag, and by a condition on headers."""
        wanted = set(NOTICED_CARRIERS.split(" || "))
        self._compare(self._read(tags=NOTICED_CARRIERS), lambda flight: flight["carrier"] in wanted)
        self._compare(
            self._read(where=FAR), lambda flight: flight["distance"] > 2500 and flight["dest"] in {"HNL", "SFO"}
        )
        print(f"filters: exactly the flights with tags={NOTICED_CARRIERS!r}, and those with where={FAR!r}", flush=True)

    def _read(self, **options: Any) -> list[Sent]:
        """Return the flights that a consumer gets up to the present end."""
        with memq.Consumer(self.broker.address, FLIGHTS, end="end", **options) as consumer:
            return [
                Sent(str(record.position), json.loads(record.value or b"")) for batch in consumer for record in batch
            ]

    def _compare(self, found: list[Sent], wanted: Callable[[dict[str, Any]], bool]) -> None:
        expected = Counter(json.dumps(flight) for flight in self._flights if wanted(flight))
        require(bool(expected), "no flight matches the filter: send more records")
        require(Counter(json.dumps(each.flight) for each in found) == expected, "a filter gave other flights")

    # ---- listeners -------------------------------------------------------------------------------

    def retry(self) -> None:
        """Two listeners of a group retry and give up records; one is killed; the letters are sent back."""
        noticed = self._read(tags=NOTICED_CARRIERS)
        cancelled = {each.position for each in noticed if each.flight["dep_time"] is None}
        late = {
            each.position for each in noticed if each.position not in cancelled and each.flight["dep_delay"] >= LATE_MIN
        }
        flown = {each.position for each in noticed} - cancelled
        require(bool(cancelled and late), "no flight was cancelled or late: send more records")
        workers = [self._start("listen", f"listener-{number}") for number in range(2)]

        def done() -> dict[str, int]:
            return {step[1]: step[2] for worker in workers for step in worker.steps()}

        part = len(flown) // 8
        until(lambda: any(len(each.steps()) >= part for each in workers), "a listener has handled some records")
        survivor, victim = sorted(workers, key=lambda each: len(each.steps()))
        victim.process.kill()
        victim.process.wait()
        print(f"  killed a listener with SIGKILL after {len(victim.steps())} records", flush=True)
        with memq.DeadLetterQueue(self.broker.address, "notices") as queue:
            until(lambda: done().keys() >= flown, "the other listener has handled all flights")
            until(lambda: {str(each.origin) for each in queue.letters()} >= cancelled, "cancelled flights are letters")
            letters = queue.letters()
            require({str(each.origin) for each in letters} == cancelled, "a letter is no cancelled flight")
            require(all("was cancelled" in each.cause for each in letters), "a dead letter has no cause")
            require(all(each.attempts == len(RETRY_DELAYS_S) + 1 for each in letters), "a letter has other attempts")
            require(done().keys() == flown, "a cancelled flight was announced")
            require(all(done()[position] >= 2 for position in late), "a late flight had no second try")
            survivor.process.terminate()
            require(survivor.process.wait() == 0, "the listener did not end well")
            print(
                f"listener: {len(flown):,} flights handled, {len(late)} of them after a retry; {len(cancelled)} "
                f"given up, the first: {letters[0].cause}",
                flush=True,
            )
            sent = queue.redrive()
            handled = self._listen("notices", NOTICED_CARRIERS, lambda message: None)
            with handled as again:
                until(lambda: {position for _, position in again.done} >= cancelled, "letters are handled")
            require(sent == len(letters) and not queue.letters(), "letters wait after they were sent back")
        print("dead letters: all sent back and handled; none waits", flush=True)

    def _start(self, role: str, name: str, hang_at: int = 0) -> Worker:
        journal = self._data / f"{name}.jsonl"
        command = [sys.executable, str(WORKERS), role, self.broker.address, str(journal), str(hang_at)]
        with (self._data / f"{name}.log").open("a", encoding="utf-8") as log:
            process = subprocess.Popen(command, stderr=log)
        self._stack.callback(process.kill)
        return Worker(process, journal)

    @contextmanager
    def _listen(
        self, group: str, tags: str, handle: Callable[[memq.Message], object], **options: Any
    ) -> Iterator[Handled]:
        """Run a listener in this program."""
        handled = Handled()

        def work(message: memq.Message) -> object:
            answer = handle(message)
            if answer is None:
                handled.add(message)
            return answer

        with memq.Listener(
            self.broker.address,
            FLIGHTS,
            group,
            work,
            tags=tags,
            session_timeout_ms=SESSION_MS,
            retry_delays_s=RETRY_DELAYS_S,
            **options,
        ) as listener:
            listener.start()
            yield handled

    def keep_order(self) -> None:
        """Handle flights in the order of their carrier, over a kill of the broker; park a carrier that fails."""
        expected: dict[bytes, list[str]] = {}
        for each in self._read(tags=ORDERED_CARRIERS):
            expected.setdefault(each.flight["carrier"].encode(), []).append(each.position)
        broken = expected[BROKEN_CARRIER]
        others = [key for key in expected if key != BROKEN_CARRIER]

        repaired = threading.Event()

        def gate(message: memq.Message) -> None:
            time.sleep(0.01)
            if str(message.position) == broken[0] and not repaired.is_set():
                raise RuntimeError("the gate is closed")

        options = {"ordered": True, "when_failing": "park", "concurrency": 8}
        with (
            self._listen("gates", ORDERED_CARRIERS, gate, **options) as handled,
            memq.DeadLetterQueue(self.broker.address, "gates") as queue,
        ):
            until(lambda: len(handled.done) >= 5, "the ordered listener has handled some records")
            self.broker.kill()
            until(lambda: all(len(handled.first_of(key)) == len(expected[key]) for key in others), "others are handled")
            until(lambda: {str(each.origin) for each in queue.letters()} == set(broken), "the carrier is parked")
            require(all(handled.first_of(key) == expected[key] for key in others), "records of a key changed places")
            require(not handled.first_of(BROKEN_CARRIER), "a record of the parked carrier was handled")
            repaired.set()
            queue.redrive()
            until(lambda: len(handled.first_of(BROKEN_CARRIER)) == len(broken), "parked records are handled")
            require(handled.first_of(BROKEN_CARRIER) == broken, "parked records changed places")
        print(
            f"order: {sum(map(len, expected.values()))} flights, each carrier in its order; {len(broken)} of "
            f"{BROKEN_CARRIER.decode()} were parked together, and handled later",
            flush=True,
        )

    # ---- delays ----------------------------------------------------------------------------------

    def delay(self) -> None:
        """Delay records, cancel some, and kill the broker before most are due."""
        draw = random.Random(19)
        with memq.Admin(self.broker.address) as admin:
            admin.create_topic(REMINDERS, partitions=2)
            with memq.Producer(self.broker.address) as producer:
                due: dict[str, int] = {}
                deliveries = []
                for number in range(DELAYED):
                    due_ms = int(time.time() * 1000) + draw.randrange(1_500, 7_000)
                    due[str(number)] = due_ms
                    deliveries.append(producer.send(REMINDERS, str(number), deliver_at=due_ms))
                producer.flush(timeout=WAIT_S)
                cancelled = set()
                for number in range(0, DELAYED, DELAYED // CANCELLED):
                    outcome = producer.cancel(deliveries[number])
                    if outcome is memq.CancelOutcome.CANCELLED:
                        cancelled.add(str(number))
                waiting = sum(each.records for each in admin.delayed(REMINDERS).values())
            print(f"  {waiting:,} delayed records wait, {len(cancelled)} are cancelled", flush=True)
            require(bool(cancelled) and waiting > DELAYED // 2, "delayed records were due at once")
            self.broker.kill()
            came = self._await_reminders(due.keys() - cancelled)
            require(not any(count.records for count in admin.delayed(REMINDERS).values()), "delayed records still wait")
        late_ms = sorted(at_ms - due[name] for name, at_ms in came)
        require(late_ms[0] >= 0, "a delayed record came early")
        require(sorted(name for name, _ in came) == sorted(due.keys() - cancelled), "a reminder came twice or never")
        print(
            f"delay: {len(came):,} records, each once and none early; half within {late_ms[len(came) // 2]} ms after "
            f"due, all within {late_ms[-1]} ms, with the restart",
            flush=True,
        )

    def _await_reminders(self, wanted: set[str]) -> list[tuple[str, int]]:
        """Read until all wanted records have come, and for 0.5 s more; return each with its time of arrival."""
        came: list[tuple[str, int]] = []
        missing, deadline_s = set(wanted), time.monotonic() + WAIT_S
        with memq.Consumer(self.broker.address, REMINDERS, start="beginning") as consumer:
            while True:
                batch = consumer.poll(0.5)
                if batch is None and not missing:
                    return came
                require(time.monotonic() < deadline_s, f"{len(missing)} delayed records have not come")
                at_ms = int(time.time() * 1000)
                names = [(value or b"").decode() for value in batch.values()] if batch is not None else []
                came += [(name, at_ms) for name in names]
                missing.difference_update(names)

    # ---- transactions ----------------------------------------------------------------------------

    def transact(self) -> None:
        """Bill flights with transactions; kill the biller in an open one, and the broker, too."""
        expected = sorted(each.position for each in self._read(tags=BILLED_CARRIERS))
        address = self.broker.address
        with memq.Admin(address) as admin:
            for topic in (INVOICES, LEDGER):
                admin.create_topic(topic, partitions=2)
            biller = self._start("bill", "biller", hang_at=2)
            until(lambda: bool(biller.steps()), "the biller has its second transaction open")
            biller.process.kill()
            biller.process.wait()
            (left,) = admin.transactions()
            print(f"  killed the biller with SIGKILL; its transaction is open, with {dict(left.blocks)}", flush=True)
            seen = [len(self._billed(topic)) for topic in (INVOICES, LEDGER)]
            self.broker.kill()
            biller = self._start("bill", "biller")
            require(biller.process.wait(WAIT_S) == 0, f"the biller failed; see {self._data}/biller.log")
            until(lambda: self._billed(INVOICES) == self._billed(LEDGER) == expected, "all flights are billed once")
            with (
                memq.Producer(address, transactional_id="mistakes") as producer,
                suppress(ArithmeticError),
                producer.transaction() as transaction,
            ):
                transaction.send(INVOICES, "never")
                raise ArithmeticError
            require(not admin.transactions(), "a transaction is open at the end")
            require(self._billed(INVOICES) == expected, "readers got a record that was rolled back")
        print(
            f"transactions: {len(expected):,} flights, each with one invoice and one ledger entry, of which "
            f"{seen[0]} and {seen[1]} were there at the kill",
            flush=True,
        )

    def _billed(self, topic: str) -> list[str]:
        with memq.Consumer(self.broker.address, topic, end="end") as consumer:
            return sorted((value or b"").decode() for batch in consumer for value in batch.values())

    # ---- history and audit -----------------------------------------------------------------------

    def read_history(self) -> None:
        """Read one record, count records, broadcast, and end a topic."""
        address = self.broker.address
        with memq.Admin(address) as admin:
            sent = self._read()
            first, last = (memq.Position.parse(each.position) for each in (sent[0], sent[-1]))
            record = memq.read_record(address, FLIGHTS, last)
            require(json.loads(record.value or b"") == sent[-1].flight, "a point read gave another record")
            same = [each for each in sent if memq.Position.parse(each.position).read_partition == first.read_partition]
            to = memq.Position.parse(same[-1].position)
            require(admin.count(FLIGHTS, first, to) == len(same) - 1, "the count between two positions is wrong")
            admin.seal_topic(FLIGHTS)
            for host in ("host-1", "host-2"):  # each reads all, and ends by itself
                with memq.Consumer(address, FLIGHTS, broadcast=host) as consumer:
                    count = sum(len(batch) for batch in consumer)
                require(count == len(self._flights), f"{host} has read {count} records")
        print(f"history: a record by its position, {len(same) - 1:,} counted; two hosts read a sealed topic to its end")

    def audit(self) -> None:
        """Ask `memq audit` about the topics with most records, and the live audit about all."""
        topics = (FLIGHTS, REMINDERS, INVOICES, LEDGER, "notices.retry", "notices.dead-letters", "gates.dead-letters")
        audit = [sys.executable, "-m", "memq", "audit", "-b", self.broker.address]
        read = topics[:AUDITED]  # the live audit has all of them
        audits = [subprocess.Popen([*audit, topic], stdout=subprocess.PIPE, text=True) for topic in read]
        for topic, process in zip(read, audits, strict=True):
            said, _ = process.communicate(timeout=WAIT_S)
            print("audit, " + next((line for line in said.splitlines() if "verdict" in line), said), flush=True)
            require(process.returncode == 0, f"the audit of '{topic}' has findings:\n{said}")
            proven = topic not in PROVEN or "verdict: clean" in said
            require(proven, f"the audit of '{topic}', whose records were held, is not clean:\n{said}")
        found = asyncio.run(live_findings(self._data / "audit.sqlite", topics, len(self._flights)))
        require(not found, f"the live audit has findings: {found}")
        print("a topic would be incomplete if a killed producer had not proven its end; the steps compared all records")
        print(f"live audit of {len(self._flights):,} flights, and all that came of them: no findings", flush=True)


async def live_findings(path: Path, topics: tuple[str, ...], records: int) -> list[str]:
    """Return the findings of the live audit about topics, when it has audited all flights."""
    state = SqliteDatabase(path)
    try:
        view = AuditView(state)
        async with asyncio.timeout(WAIT_S):
            seen = 0
            while seen < records:
                await asyncio.sleep(POLL_S)
                seen = await audited(view)
        return [str(each) for topic in topics for each in await view.findings(topic)]
    finally:
        await state.close()


async def audited(view: AuditView) -> int:
    """Return how many flights the live audit has found in the queue."""
    summaries = await view.topics(0, 1 << 40)
    return sum(each.row.side("")["committed"] for each in summaries if each.topic == FLIGHTS)


if __name__ == "__main__":
    sys.exit(main())

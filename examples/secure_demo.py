"""A cluster with TLS, identities and permissions; the flights go through it, and twelve attacks fail.

Run it with `make secure-demo`. It makes an authority and certificates, starts the servers and three brokers, allows one
principal to write a topic and another one to read it, sends flight records, reads them back and compares every byte.
Then strangers try twelve ways in. At last the right of the writer is taken away while it sends.
"""

from __future__ import annotations

import argparse
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from cluster_demo import PARTITIONS, TOPIC, cluster
from demo import Lines, compare, finish
from flights import RECORDS, flights
from folders import claim, clear

import memq
from memq.errors import DeniedError, MemqError, NotFoundError
from memq.permissions import AccessRule
from memq_localstack.stack import down

GROUP = "reports"
WAIT_S = 60
TOP = 'permissions = true\nsuperusers = "admin"\nbroker_principals = "broker"\n'
DENIAL = re.compile(r"(?:permission-denied|permission-hidden|handshake-refused): .*")
LOG_S = 10


@dataclass(frozen=True)
class Identities:
    """The certificates of the demo, by the name of their holder."""

    folder: Path

    def make(self) -> None:
        """Make the authority, a certificate for the brokers, and one for each user."""
        certs("init", self.folder)
        certs("issue", self.folder, "broker", "--host", "127.0.0.1")
        for name in ("admin", "loader", "reader", "mallory"):
            certs("issue", self.folder, name)

    def of(self, name: str, authority: Path | None = None) -> memq.Tls:
        """Return what a user connects with; `authority`: the folder of another authority's certificate."""
        home = authority or self.folder
        ca_file = str(self.folder / "ca.pem")
        return memq.Tls(ca_file=ca_file, cert_file=str(home / f"{name}.pem"), key_file=str(home / f"{name}-key.pem"))

    def section(self) -> str:
        """Return the section `[tls]` of the brokers."""
        files = {"cert_file": "broker.pem", "key_file": "broker-key.pem", "ca_file": "ca.pem"}
        lines = [f'{name} = "{(self.folder / file).absolute()}"' for name, file in files.items()]
        return "\n[tls]\n" + "\n".join([*lines, 'clients = "required"', "http = false"]) + "\n"


def main() -> int:
    """Run the demo; the exit code is 0 when every byte came back and every attack failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("memq-secure-demo"), help="data folder, emptied first")
    parser.add_argument("--records", type=int, default=RECORDS, help="send only so many")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end with the demo
    with claim(options.data):
        return run(options.data, options.records)


def run(data: Path, records: int) -> int:
    """Run it in a folder, and return the exit code."""
    for left in down(data):
        print(f"ending {left.name}, which an earlier run left", flush=True)
    clear(data)
    users, others = Identities(data / "certs"), Identities(data / "other-certs")
    users.make()
    others.make()
    print("reading the flight records …", flush=True)
    lines = [item for item, _ in zip(flights(), range(records), strict=False)]
    with cluster(data, TOP, users.section()) as brokers:
        addresses = ",".join(broker.address for broker in brokers.values())
        allow(addresses, users)
        send(addresses, users, lines)
        same = compare(lines, receive(addresses, users))
        logs = [broker.log for broker in brokers.values()]
        failed = attack(addresses, users, others, logs)
        stopped = revoke(addresses, users)
        print(f"the logs of the brokers have {len(denials(logs))} refusals", flush=True)
    return 0 if same and failed and stopped else 1


def denials(logs: list[Path]) -> list[str]:
    """Return the lines about refused handshakes and requests in the logs of the brokers."""
    return [line for log in logs for line in DENIAL.findall(log.read_text())]


def new_denial(logs: list[Path], before: list[str], words: str) -> str:
    """Wait for a line with these words that the logs did not have before, and return it; "" without one."""
    until = time.monotonic() + LOG_S
    while time.monotonic() < until:
        for line in denials(logs):
            if line not in before and words in line:
                return line
        time.sleep(0.05)
    return ""


def allow(addresses: str, users: Identities) -> None:
    """Create the topic, and let one principal write it and another one read it."""
    with memq.Admin(addresses, tls=users.of("admin")) as admin:
        admin.create_topic(TOPIC, partitions=PARTITIONS)
        rules = [
            ("loader", "write", "topic", TOPIC),
            ("reader", "read", "topic", TOPIC),
            ("reader", "read", "group", GROUP),
        ]
        admin.change_permissions(add=[rule(*each) for each in rules])
    for address, name in product(addresses.split(","), ("loader", "reader")):
        until = time.monotonic() + WAIT_S
        while TOPIC not in topics(address, users.of(name)):  # each broker reads the rules every 2 s
            assert time.monotonic() < until, f"{name} does not see the topic at {address}"
            time.sleep(0.1)
    print("rules: loader writes the topic, reader reads it; nobody else may do anything", flush=True)


def send(addresses: str, users: Identities, lines: list[tuple[bytes, bytes]]) -> None:
    """Send every line with its carrier as key."""
    started = time.perf_counter()
    with memq.Producer(addresses, acks="all", tls=users.of("loader"), audit=False) as producer:
        for carrier, line in lines:
            producer.send(TOPIC, line, key=carrier)
        producer.flush(timeout=120)
    finish("sent over TLS, all acked", len(lines), sum(len(line) for _, line in lines), time.perf_counter() - started)


def rule(principal: str, permission: str, kind: str, name: str) -> AccessRule:
    """Return a rule that allows something."""
    return AccessRule(effect="allow", principal=principal, permission=permission, kind=kind, name=name)


def receive(addresses: str, users: Identities) -> Lines:
    """Read the topic as a group."""
    found: Lines = {}
    with memq.Consumer(
        addresses, TOPIC, group=GROUP, end="end", read="broker", tls=users.of("reader"), audit=False
    ) as consumer:
        for batch in consumer:
            for record in batch:
                found.setdefault(record.key or b"", []).append(record.value or b"")
            consumer.commit(batch)
    return found


def attack(addresses: str, users: Identities, others: Identities, logs: list[Path]) -> bool:
    """Try twelve ways in; return whether all failed, and each has its line in a log."""
    mallory, reader, loader = users.of("mallory"), users.of("reader"), users.of("loader")
    anonymous = memq.Tls(ca_file=mallory.ca_file)
    stranger = users.of("admin", others.folder)
    write_topic, read_topic = f"may not write topic '{TOPIC}'", f"may not read topic '{TOPIC}'"
    see_topic = f"principal 'mallory' may not describe topic '{TOPIC}'"
    see_cluster = "principal 'mallory' may not describe cluster"
    rules = "principal 'mallory' may not alter cluster"
    attacks: list[tuple[str, str, Callable[[], object]]] = [
        ("a client without TLS", "no TLS: wrong version", lambda: topics(addresses, None)),
        ("a client without a certificate", "did not return a certificate", lambda: topics(addresses, anonymous)),
        ("a certificate of another authority", "no TLS: ", lambda: topics(addresses, stranger)),
        ("a former version of TLS", "unsupported protocol", lambda: old_tls(addresses, mallory)),
        ("mallory reads the topic", see_topic, lambda: read(addresses, mallory)),
        ("mallory writes to the topic", see_topic, lambda: write(addresses, mallory)),
        ("mallory deletes the topic", see_topic, lambda: administer(addresses, mallory, delete)),
        ("mallory makes a topic", "may not create topic 'own'", lambda: administer(addresses, mallory, create)),
        ("mallory allows itself everything", rules, lambda: administer(addresses, mallory, allow_all)),
        (
            "mallory drains a broker",
            see_cluster,
            lambda: administer(addresses, mallory, drain),
        ),
        ("reader writes to the topic", f"'reader' {write_topic}", lambda: write(addresses, reader)),
        ("loader reads the topic", f"'loader' {read_topic}", lambda: read(addresses, loader)),
    ]
    failed = 0
    for number, (name, words, work) in enumerate(attacks, 1):
        before = denials(logs)
        try:
            work()
        except (MemqError, OSError) as error:
            logged = new_denial(logs, before, words)
            failed += bool(logged)
            print(f"attack {number}: {name}: refused: {str(error)[:110]}", flush=True)
            print(f"  logged: {logged[:160] or 'NOTHING'}", flush=True)
        else:
            print(f"attack {number}: {name}: SUCCEEDED", flush=True)
    seen = topics(addresses, mallory)
    print(f"{failed} of {len(attacks)} attacks failed and were logged; mallory sees {len(seen)} topics", flush=True)
    return failed == len(attacks) and not seen


def revoke(addresses: str, users: Identities) -> bool:
    """Take the right of the writer away while it sends; return whether it was stopped."""
    started = time.monotonic()
    with memq.Producer(addresses, tls=users.of("loader"), audit=False, linger_ms=0) as producer:
        producer.send(TOPIC, b"before", key=b"AA").result(WAIT_S)
        with memq.Admin(addresses, tls=users.of("admin")) as admin:
            admin.change_permissions(remove=[rule("loader", "write", "topic", TOPIC)])
        changed = time.monotonic()
        while time.monotonic() - started < WAIT_S:
            try:
                producer.send(TOPIC, b"after", key=b"AA").result(WAIT_S)
            except (DeniedError, NotFoundError) as error:  # a topic that it may not see does not exist for it
                waited_s = time.monotonic() - changed
                print(f"the writer was stopped {waited_s:.1f} s after its rule went: {error}", flush=True)
                return True
    return False


def topics(addresses: str, tls: memq.Tls | None) -> list[str]:
    """Return the topics that a user sees."""
    with memq.Admin(addresses, tls=tls) as admin:
        return [topic.name for topic in admin.topics()]


def read(addresses: str, tls: memq.Tls) -> int:
    """Return how many records a user reads."""
    with memq.Consumer(addresses, TOPIC, end="end", tls=tls, audit=False) as consumer:
        return sum(len(batch) for batch in consumer)


def write(addresses: str, tls: memq.Tls) -> memq.Ack:
    """Send a record as a user."""
    with memq.Producer(addresses, tls=tls, audit=False) as producer:
        return producer.send(TOPIC, b"forged").result(WAIT_S)


def administer(addresses: str, tls: memq.Tls, work: Callable[[memq.Admin], object]) -> None:
    """Change something as a user."""
    with memq.Admin(addresses, tls=tls) as admin:
        work(admin)


def allow_all(admin: memq.Admin) -> None:
    """Allow mallory everything."""
    admin.change_permissions(add=[rule("mallory", "all", "cluster", "*")])


def delete(admin: memq.Admin) -> None:
    """Delete the topic."""
    admin.delete_topic(TOPIC)


def create(admin: memq.Admin) -> None:
    """Make a topic."""
    admin.create_topic("own")


def drain(admin: memq.Admin) -> None:
    """Drain a broker."""
    admin.drain_broker("broker-1")


def old_tls(addresses: str, tls: memq.Tls) -> None:
    """Connect with TLS 1.2."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(tls.ca_file)
    context.load_cert_chain(tls.cert_file, tls.key_file)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, port = addresses.split(",", maxsplit=1)[0].rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as raw, context.wrap_socket(raw, server_hostname=host):
        pass


def certs(command: str, folder: Path, *arguments: str) -> None:
    """Run `memq certs`."""
    line = [sys.executable, "-m", "memq", "certs", command, *arguments, "--dir", str(folder)]
    subprocess.run(line, check=True)


if __name__ == "__main__":
    sys.exit(main())

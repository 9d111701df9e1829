"""The main job on a real cluster: three brokers on S3, Kafka and ZooKeeper; two are killed, nothing may be lost.

Run it with `make cluster-demo`. It starts the servers and the brokers, sends 336,776 flight records with ack=all, ends
one broker and then the governor with SIGKILL while they are sent, reads all back, compares every byte, and asks the
auditor: nothing lost, nothing doubled.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from demo import compare, finish, receive
from flights import RECORDS, flights
from folders import claim, clear

import memq
from memq_localstack.servers import S3Server, Server, start_broker, start_kafka, start_s3, start_zookeeper
from memq_localstack.stack import down, write_settings

TOPIC = "flights"
PARTITIONS = 6
BROKERS = 3
GOVERNS = re.compile(r"broker '([^']+)' governs in term (\d+)")


def main() -> int:
    """Run the demo; the exit code is 0 when every byte came back and the audit is clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("memq-cluster-demo"), help="data folder, emptied first")
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
    print("reading the flight records …", flush=True)
    lines = [item for item, _ in zip(flights(), range(records), strict=False)]
    size = sum(len(line) for _, line in lines)
    print(f"{len(lines):,} flights, {size / 1e6:.1f} MB as JSON lines", flush=True)
    with cluster(data) as brokers:
        addresses = ",".join(broker.address for broker in brokers.values())
        send(addresses, brokers, lines, size)
        same = compare(lines, receive(addresses, len(lines), size))
        audit = subprocess.run([sys.executable, "-m", "memq", "audit", TOPIC, "-b", addresses], check=False)
    return 0 if same and audit.returncode == 0 else 1


@contextmanager
def cluster(data: Path, top: str = "", end: str = "") -> Iterator[dict[str, Server]]:
    """Run S3, ZooKeeper, Kafka and three brokers; yield the brokers by name; end all.

    `top` and `end` are more settings of the brokers: before all sections, and more sections.
    """
    with ExitStack() as stack:
        for start in (start_s3, start_zookeeper, start_kafka):
            server = stack.enter_context(start(data / start.__name__.removeprefix("start_")))
            print(f"{server.launch.kind} runs at {server.address}", flush=True)
            if isinstance(server, S3Server):  # consumer and auditor read the objects themselves
                os.environ |= {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
                os.environ["MEMQ_S3_TRUSTED_ENDPOINTS"] = server.endpoint
        config = write_settings(data.absolute())
        assert config is not None, "all three are up"
        config.write_text(top + config.read_text(encoding="utf-8") + end, encoding="utf-8")
        brokers = {}
        for number in range(1, BROKERS + 1):
            name = f"broker-{number}"
            brokers[name] = stack.enter_context(start_broker(data / name, config, name))
            print(f"{name} runs at {brokers[name].address}", flush=True)
        yield brokers


def send(addresses: str, brokers: dict[str, Server], lines: list[tuple[bytes, bytes]], size: int) -> None:
    """Send every line with its carrier as key, and kill brokers meanwhile; wait until all are stored and published."""
    with memq.Admin(addresses) as admin:
        admin.create_topic(TOPIC, partitions=PARTITIONS)
    governor = governor_of(brokers)
    other = next(name for name in brokers if name != governor)
    kills = {len(lines) // 3: (other, "a broker"), 2 * len(lines) // 3: (governor, "the governor")}
    started = time.perf_counter()
    with memq.Producer(addresses, acks="all") as producer:
        for number, (carrier, line) in enumerate(lines):
            producer.send(TOPIC, line, key=carrier)
            if number in kills:
                name, what = kills[number]
                brokers[name].kill()
                print(f"killed {name}, {what}, with SIGKILL after {number:,} records", flush=True)
        producer.flush(timeout=120)
    finish("sent, all acked with ack=all", len(lines), size, time.perf_counter() - started)
    print(f"{governor_of(brokers)} governs now", flush=True)
    for name in (other, governor):
        print(f"{name} is back at {brokers[name].start().address}", flush=True)


def governor_of(brokers: dict[str, Server]) -> str:
    """Return who governs, as the brokers' logs tell: whoever took the highest term."""
    said = "".join(broker.log.read_text(encoding="utf-8") for broker in brokers.values())
    terms: dict[int, str] = {int(term): name for name, term in GOVERNS.findall(said)}
    return terms[max(terms)]


if __name__ == "__main__":
    sys.exit(main())

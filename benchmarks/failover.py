"""Row 12: from SIGKILL of a broker to acks on all its partitions, on Kafka, ZooKeeper and files.

Three brokers have six partitions; a producer sends 500 records/s. In turn the victim is an owner, and the governor. The
session timeout is the default, so a takeover that waits for it takes longer.
"""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import memq
from benchmarks.results import Figure, Options, percentile
from memq_localstack.servers import Server, start_broker, start_kafka, start_zookeeper

NAME = "failover"
BROKERS, PARTITIONS, TOPIC = 3, 6, "clicks"
RATE = 500
KILLS, QUICK_KILLS = 20, 4
P50_S_MAX, P99_S_MAX = 0.7, 1.2
DEADLINE_S = 60.0
REST_S = 2.0  # from the start of the killed broker to the next kill


def run(options: Options) -> list[Figure]:
    """Kill brokers, and measure each."""
    found: dict[str, list[float]] = {"owner": [], "governor": []}
    with ExitStack() as stack:
        brokers = start_cluster(stack)
        addresses = ",".join(broker.address for broker in brokers.values())
        admin = stack.enter_context(memq.Admin(addresses))
        admin.create_topic(TOPIC, partitions=PARTITIONS)
        producer = stack.enter_context(memq.Producer(addresses, acks="all", linger_ms=5))
        traffic = stack.enter_context(Traffic(producer))
        for number in range(QUICK_KILLS if options.quick else KILLS):
            kind = ("owner", "governor")[number % 2]
            time.sleep(REST_S)
            name = governor(admin) if kind == "governor" else owner(admin, number % PARTITIONS)
            seconds = killed(producer, brokers[name])
            found[kind].append(seconds)
            options.say(f"{kind} {name}: {seconds:.2f} s")
            brokers[name].restart()
        traffic.check()
    both = found["owner"] + found["governor"]
    figures = []
    for share, bound in ((0.5, P50_S_MAX), (0.99, P99_S_MAX)):
        detail: dict[str, float | str] = {kind: percentile(each, share) for kind, each in found.items()}
        case = f"SIGKILL to acks on all partitions, p{100 * share:.0f}"
        figures.append(Figure(NAME, case, percentile(both, share), "s", bound, detail=detail))
    return figures


def start_cluster(stack: ExitStack) -> dict[str, Server]:
    """Start the servers and the brokers; they end with the stack."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memq-bench-", ignore_cleanup_errors=True)))
    zookeeper = stack.enter_context(start_zookeeper(folder / "zookeeper"))
    kafka = stack.enter_context(start_kafka(folder / "kafka"))
    config = folder / "memq.toml"
    config.write_text(
        f'store = "file:{folder / "objects"}"\nqueue = "kafka://{kafka.address}"\nlog_level = "info"\n'
        f'coordinator = "zookeeper://{zookeeper.address}/bench"\n[kafka]\nreplication_factor = 1\n',
        encoding="utf-8",
    )
    names = [f"b{number + 1}" for number in range(BROKERS)]
    return {name: stack.enter_context(start_broker(folder / name, config, name)) for name in names}


def governor(admin: memq.Admin) -> str:
    """Return the name of the governor."""
    return next(each.broker for each in admin.brokers() if each.governs)


def owner(admin: memq.Admin, partition: int) -> str:
    """Return the name of the owner of a partition."""
    return next(each.broker for each in admin.topic(TOPIC).owners if each.partition == partition)


def killed(producer: memq.Producer, broker: Server) -> float:
    """Kill a broker; return the seconds until a record sent afterwards to each partition is acked."""
    began_s = time.monotonic()
    broker.kill()
    sent = [producer.send(TOPIC, b"after", partition=partition) for partition in range(PARTITIONS)]
    for delivery in sent:
        delivery.result(DEADLINE_S)
    return time.monotonic() - began_s


class Traffic:
    """Sends to all partitions in turn, on a thread of its own."""

    def __init__(self, producer: memq.Producer) -> None:
        self._producer = producer
        self._end = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def check(self) -> None:
        """Raise the error that ended the traffic, if one did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        number = 0
        try:
            while not self._end.wait(1 / RATE):
                self._producer.send(TOPIC, b"%d" % number, partition=number % PARTITIONS)
                number += 1
        except BaseException as error:  # noqa: BLE001  # `check` raises it
            self._error = error

"""`memq audit`: what was lost, doubled or damaged in a topic, and how sure that is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import click

from memq.audit.collector import audit as audit_topic
from memq.audit.verdict import THROUGH_STORE, Finding, Verdict
from memq.audit.whole_object import ReadObject, read_by_ranges
from memq.cli.options import broker_options, brokers_of, json_option
from memq.cli.output import Progress, count_text, print_json, print_table, talk
from memq.cli.run import FAILED, OK
from memq.client.any_broker import AnyBroker
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.client.metadata import ClusterMetadata
from memq.client.stores import OpenStores
from memq.errors import MemqError
from memq.format.block import Buffer
from memq.format.key import shared_prefix, topic_prefix
from memq.format.pointer import Location
from memq.network import Runtime
from memq.notification.remote import RemoteQueue
from memq.settings import Value
from memq.storage_handlers import StorageHandler
from memq.topic import Topic, read_partitions

PLACES_SHOWN = 3
_BREAK = "\n" + " " * len("coverage: ")
PLACE_CHARS_MAX = 320  # --json has all of it
METADATA_S_MAX = 10.0
THROUGH_BROKER = "a broker, whose memory answers for the store"


@click.command()
@click.argument("topic")
@broker_options
@json_option
def audit(topic: str, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Read all that TOPIC's queue names, and say what was lost, doubled or damaged, and how sure that is.

    Exits with 0 when nothing is wrong: the verdict is then clean, or incomplete when producers have not said where
    they ended.
    """
    brokers = brokers_of(config, profile, flags)
    read = [0]
    try:
        verdict = asyncio.run(audit_by_brokers(brokers, topic, read))
    except KeyboardInterrupt:
        talk(f"interrupted: {count_text(read[0], 'pointer')} read")
        raise
    if as_json:
        print_json(verdict.to_json())
    else:
        print_verdict(verdict)
    return OK if verdict.passed else FAILED


def print_verdict(verdict: Verdict) -> None:
    """Print a verdict for people: a line for each class of findings, the verdict, and what it rests on."""
    if verdict.findings:
        print_table(("finding", "count", "of", "where"), [_row(finding) for finding in verdict.findings])
        click.echo()
    click.echo(f"verdict: {verdict}")
    parts = str(verdict.coverage).split("; ")
    click.echo(f"coverage: {_BREAK.join(parts)}")


def _row(finding: Finding) -> tuple[object, ...]:
    shown = [_shortened(str(place)) for place in finding.places[:PLACES_SHOWN]]
    more = " …" if len(finding.places) > PLACES_SHOWN else ""
    unit = count_text(finding.count, finding.kind.unit).split(" ", 1)[1]
    return (finding.kind.title, finding.count, unit, "; ".join(shown) + more)


def _shortened(text: str) -> str:
    return text if len(text) <= PLACE_CHARS_MAX else text[: PLACE_CHARS_MAX - 1] + "…"


async def audit_by_brokers(brokers: str, name: str, read: list[int]) -> Verdict:
    """Return the verdict on a topic; `read[0]` counts the pointers on the way.

    Raises: UnreachableError, NotFoundError.
    """
    async with opened_topic(brokers, name) as opened:
        with Progress("audit", await _count_pointers(opened.queue, opened.topic)) as progress:
            moved, now_ms = _counter(read, progress), Runtime().clock.wall_ms()
            return await audit_topic(
                opened.topic, opened.queue, opened.read, now_ms, through=opened.through, moved=moved
            )


@dataclass(frozen=True, slots=True)
class OpenedTopic:
    """A topic with what reads its pointers and objects; `through` says how objects are read."""

    topic: Topic
    queue: RemoteQueue
    read: ReadObject
    through: str


@asynccontextmanager
async def opened_topic(brokers: str, name: str) -> AsyncIterator[OpenedTopic]:
    """Open a topic of the cluster at `brokers`. Raises: UnreachableError, NotFoundError."""
    runtime = Runtime()
    pool = LinkPool(runtime, bootstrap_addresses(brokers))
    metadata = ClusterMetadata(runtime, pool)
    stores = OpenStores(metadata, runtime)
    try:
        topic = (await metadata.topic(name, timeout_s=METADATA_S_MAX)).topic
        any_broker = AnyBroker(pool)
        source, through = await _source(metadata, stores, topic, any_broker)
        yield OpenedTopic(topic, RemoteQueue(any_broker), source, through)
    finally:
        await metadata.close()
        await stores.close()
        await pool.close()


async def _count_pointers(queue: RemoteQueue, topic: Topic) -> int:
    spans = await queue.spans(read_partitions(topic))
    return sum(span.end - span.begin for span in spans.values())


def _counter(read: list[int], progress: Progress) -> Callable[[int], None]:
    def moved(count: int) -> None:
        read[0] += count
        progress.move(count)

    return moved


async def _source(
    metadata: ClusterMetadata, stores: OpenStores, topic: Topic, any_broker: AnyBroker
) -> tuple[ReadObject, str]:
    """Return how to read objects: straight from stores that open here and hold the topic, else through a broker.

    A folder of the same name on another machine opens too, and holds nothing: then each object would seem missing.
    """
    direct: dict[str, StorageHandler] = {}
    for store in metadata.stores:
        opened = stores(store.name)
        if opened is not None and await _holds(opened, metadata.cluster, topic):
            direct[store.name] = opened

    async def read(location: Location, *, whole: bool) -> Buffer:
        store = direct.get(location.store)
        if not whole:
            place = (location.key, location.offset, location.length)
            return await (store.get_range(*place) if store else any_broker.read(location.store, *place))
        return await (store.get(location.key, checked=False) if store else read_by_ranges(any_broker.read, location))

    return read, THROUGH_STORE if len(direct) == len(metadata.stores) else THROUGH_BROKER


async def _holds(store: StorageHandler, cluster: str, topic: Topic) -> bool:
    try:
        for prefix in (topic_prefix(cluster, topic.name, topic.id), shared_prefix(cluster)):
            async for _ in store.list(prefix):
                return True
    except MemqError:  # no way to it from here, or no right to list: the broker reads
        return False
    return False

"""`memq verify`: checks objects byte for byte, and that every pointer has its object."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memq.audit.checks.object_check import NamedBatch, NamedObjects, ObjectVerdict, check_file
from memq.cli.options import broker_options, brokers_of, json_option, s3_values, settings_of
from memq.cli.output import count_text, print_json, print_message
from memq.cli.store.object_files import FoundObject, find_objects, is_data_folder
from memq.errors import (
    CorruptDataError,
    DeniedError,
    InvalidNameError,
    NotFoundError,
    QueueError,
    StoreError,
    UnreachableError,
)
from memq.format.blocks.header import Buffer
from memq.format.pointer import Location
from memq.settings import Section, Value
from memq.topic import ReadPartition, check_resource_name, is_state_topic, read_partitions

if TYPE_CHECKING:
    from memq.notification.sqlite.queue import SqliteQueue
    from memq.runtime.clock import Clock

READS_MAX = 5  # of an object that seems to be damaged


@dataclass(slots=True)
class VerifiedCount:
    """Checked objects and their findings: object, position in it, code and text of the error."""

    quiet: bool
    objects: int = 0
    blocks: int = 0
    records: int = 0
    pointers: int = 0  # that were compared with their objects
    findings: list[dict[str, object]] = field(default_factory=list)

    @property
    def damaged(self) -> int:
        """Number of objects with a finding."""
        return len({finding["object"] for finding in self.findings})

    def find(self, name: str, where: dict[str, object], code: str, text: str) -> None:
        """Record a fault, and print it at once."""
        self.findings.append({"object": name, **where, "error": code, "text": text})
        if not self.quiet:
            click.echo(f"{name}: {' '.join(f'{what} {at}' for what, at in where.items())}: {text}")


@click.command()
@click.argument("targets", metavar="URI|FILE|FOLDER|TOPIC...", nargs=-1, required=True)
@broker_options
@json_option
def verify(
    targets: tuple[str, ...], as_json: bool, config: str | None, profile: str | None, **flags: Value | None
) -> None:
    """Check objects from end to end: trailer, index, every block's checksum and columns.

    A URI is file:///PATH or s3://BUCKET/KEY?endpoint=URL. A folder is checked with all folders below it. For the
    data folder of a memq dev, and for a topic (a name without a path), the pointers of the queue are checked, too:
    the object of each exists, and is the one that the pointer names. An acked record without a pointer is no damage
    of an object: memq audit finds it. An object that retention removes meanwhile is named, and is no damage.
    A folder may be read-only: then the queue file is copied to a temporary folder if no process has it open.
    """
    total = VerifiedCount(quiet=as_json)
    topics = [target for target in targets if _is_topic(target)]
    settings = settings_of(config, profile)
    section = settings.parts().section("s3")
    folders = [Path(target) for target in targets if target not in topics and is_data_folder(target)]
    for folder in filter(_lacks_objects, folders):
        total.find(str(folder / "objects"), {}, CorruptDataError.code, "the folder of the objects is missing")
    paths = [target for target in targets if target not in topics and not _lacks_objects(target)]
    objects = [one for target in paths for one in _objects_of(target, section)]
    try:
        with _progress(objects) as moving:
            for one in moving:
                _verify_object(one, total)
        for folder in folders:
            asyncio.run(_verify_folder(folder, total))
        for topic in topics:
            try:
                s3 = s3_values(settings)
                asyncio.run(_verify_topic(brokers_of(config, profile, flags), topic, s3, total))
            except DeniedError as error:
                hint = "memq verify reads the store itself: give it keys and a way there; memq audit asks a broker"
                raise DeniedError(str(error), hint=hint) from error
            except (NotFoundError, UnreachableError) as error:  # the target may be a wrong path of a file
                error.hint = f"no file or folder '{topic}' is here, so a topic is checked; {error.hint}"
                raise
    except KeyboardInterrupt:
        print_message(f"interrupted after {count_text(total.objects, 'object')}")
        raise
    _report(total, as_json=as_json)


def _is_topic(target: str) -> bool:
    """Whether a target is a topic's name: no file has that name, and the name can't be a path."""
    try:
        check_resource_name(target, internal=True)
    except InvalidNameError:
        return False
    return not Path(target).exists()


def _lacks_objects(target: str | Path) -> bool:
    return is_data_folder(target) and not (Path(target) / "objects").is_dir()


def _objects_of(target: str, section: Section) -> tuple[FoundObject, ...]:
    """Return the objects of a target.

    The queue of a data folder is compared also if the folder has no objects.
    Raises: as `find_objects`; NotFoundError for any other folder without files.
    """
    found = find_objects(target, section)
    if not found.objects and not is_data_folder(target):
        raise NotFoundError(f"no file is below '{found.name}'", hint="name an object, or a folder with some")
    return found.objects


def _verify_object(one: FoundObject, total: VerifiedCount) -> None:
    try:
        try:
            verdict = verdict_of(one)
        except (NotFoundError, FileNotFoundError):  # one answer proves no absence
            verdict = verdict_of(one)
    except (NotFoundError, FileNotFoundError):
        if not one.listed:
            raise
        print_message(f"{one.name} was removed after it was listed, and is not checked")
        return
    total.objects += 1
    _take_verdict(one.name, verdict, total)


def _take_verdict(name: str, verdict: ObjectVerdict, total: VerifiedCount, *, counts: bool = True) -> None:
    if counts:
        total.blocks += verdict.blocks
        total.records += verdict.records
    for finding in verdict.findings:
        total.find(name, {"offset": finding.offset}, finding.code, finding.text)


def verdict_of(one: FoundObject) -> ObjectVerdict:
    """Check an object.

    An object that seems to be damaged is read again until two reads agree, because bits may flip on the way.
    Raises: StoreError when no two of them agree, which proves no damage.
    """
    verdict = check_file(one.name, one.read())
    for _ in range(READS_MAX - 1):
        if not verdict.findings:
            return verdict
        last, verdict = verdict, check_file(one.name, one.read())
        if verdict.findings == last.findings:
            return verdict
    if not verdict.findings:
        return verdict
    raise StoreError(
        f"{one.name} was read {READS_MAX} times, and no two reads agree: {verdict.findings[0].text}",
        hint="bytes change on the way from the store: check the disk, the network and proxies between",
    )


async def _verify_folder(folder: Path, total: VerifiedCount) -> None:
    """Compare every pointer of a data folder's queue with its objects; a broker may run on it meanwhile."""
    from memq.broker.data_folder import cluster_of
    from memq.compaction.reader import (
        CompactedLogReader,
        ManifestFiles,  # imported here: a file is verified without a queue
    )
    from memq.runtime.runtime import Runtime
    from memq.storage_handlers.filesystem import FilesystemHandler

    file, runtime = folder / "queue.sqlite", Runtime()
    if not file.is_file() or not file.stat().st_size:
        text = "the queue is missing or empty, so nothing says which objects there should be; see memq restore"
        total.find(str(file), {}, CorruptDataError.code, text)
        return
    cluster, objects = cluster_of(folder), folder / "objects"
    async with contextlib.AsyncExitStack() as stack:
        store = FilesystemHandler(objects, folder / "tmp")
        stack.push_async_callback(store.close)
        queue = _opened_queue(file, runtime.clock, stack)
        stack.push_async_callback(queue.close)
        reader = CompactedLogReader(queue, ManifestFiles(cluster, store), runtime.clock)
        named = NamedObjects(cluster, reader, lambda location: store.get(location.key, checked=False))
        for partition in await queue.partitions():
            if is_state_topic(partition.topic):
                continue
            async for _ in _verified(named, partition, total, lambda key: str(objects / key)):
                pass


def _opened_queue(file: Path, clock: Clock, stack: contextlib.AsyncExitStack) -> SqliteQueue:
    """Open a queue file; in a folder that can't be written a copy of it, which ends with `stack`."""
    from memq.notification.sqlite.queue import SqliteQueue
    from memq.runtime.sqlite_file import copy_closed

    try:
        return SqliteQueue(file, clock)
    except DeniedError:
        copies = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memq-verify-")))
        return SqliteQueue(copy_closed(file, copies, QueueError), clock)


async def _verify_topic(brokers: str, name: str, s3: Mapping[str, object], total: VerifiedCount) -> None:
    """Compare every pointer of a topic with its objects, and check these from end to end.

    It reads the store directly, because a broker could answer from its memory in spite of a damaged store.
    """
    from memq.audit.opened_topic import opened_topic

    async with opened_topic(brokers, name, direct=True, s3=s3) as opened:

        async def read(location: Location) -> Buffer:
            return await opened.read(location, whole=True)

        named, last = NamedObjects(opened.cluster, opened.queue, read), ""
        for partition in read_partitions(opened.topic):
            async for batch in _verified(named, partition, total, lambda key: key):
                total.records += batch.records
                if batch.data is None or batch.key == last:
                    continue
                total.objects, last = total.objects + 1, batch.key
                if not batch.findings:
                    _take_verdict(batch.key, check_file(batch.key, memoryview(batch.data)), total, counts=False)


async def _verified(
    named: NamedObjects, partition: ReadPartition, total: VerifiedCount, name: Callable[[str], str]
) -> AsyncIterator[NamedBatch]:
    """Check one read partition, record its faults, and yield each batch."""
    log = f"topic '{partition.topic}' partition {partition.partition}"
    try:
        async for batch in named.check(partition):
            total.pointers += bool(batch.key)
            for found in batch.findings:
                where: dict[str, object] = {"partition": partition.partition, "pointer": found.offset}
                total.find(name(found.key) if found.key else log, where, found.error.code, str(found.error))
            yield batch
    except (CorruptDataError, QueueError) as error:
        total.find(log, {}, error.code, str(error))


def _report(total: VerifiedCount, *, as_json: bool) -> None:
    """Print the sum. Raises: CorruptDataError when there are findings."""
    damaged = total.damaged
    if as_json:
        counts: dict[str, object] = {"objects": total.objects, "blocks": total.blocks, "records": total.records}
        counts |= {"pointers": total.pointers} if total.pointers else {}
        print_json({**counts, "damaged": damaged, "findings": total.findings})
    else:
        blocks = f", {count_text(total.blocks, 'block')}" if total.blocks else ""
        verdict = f"{damaged} damaged or missing" if damaged else "all hold"
        records = count_text(total.records, "record")
        pointers = f", {count_text(total.pointers, 'pointer')}" if total.pointers else ""
        click.echo(f"{count_text(total.objects, 'object')}{blocks}, {records}{pointers}: {verdict}")
    if damaged:
        text = f"{damaged:,} of {total.objects:,} objects damaged"
        if total.pointers:
            objects, pointers = count_text(total.objects, "object"), count_text(total.pointers, "pointer")
            text = f"{damaged:,} damaged or missing, of {objects} and {pointers}"
        hint = "see the messages above"
        if damaged == total.objects and not total.blocks:
            hint += "; no file has a sound block of memq: if the files are no objects, name a data folder of memq dev"
        raise CorruptDataError(text, hint=hint)


@contextlib.contextmanager
def _progress(objects: list[FoundObject]) -> Iterator[Iterable[FoundObject]]:
    """Show a bar on a terminal when there is much to do."""
    if len(objects) < 2 or not sys.stderr.isatty():
        yield objects
        return
    with click.progressbar(objects, label="verify", file=sys.stderr) as bar:
        yield bar

"""One pass of the sweep by a broker: its counters and log lines, and the logs of deleted topics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memq.broker.services import Services
from memq.broker.sweep.sweep import Sweep, Unnamed
from memq.errors import NotFoundError
from memq.format.object import ObjectTopic
from memq.topic import ReadPartition

NAMED_MAX = 20  # objects that one line of the log names


class Swept(NamedTuple):
    """The result of one sweep pass: deleted objects, waiting ones with their bytes, and unproven ones."""

    objects: int = 0
    bytes: int = 0
    pending: int = 0
    pending_bytes: int = 0
    unproven: int = 0


async def sweep(services: Services, age_ms: int) -> Swept:
    """Run one pass of the sweep, see `Sweep`. Raises: MemqError."""
    settings, counters = services.settings, services.counters

    def note(text: str) -> None:
        services.events.warning("not-swept", text)

    clock, stores = services.deletion_clock, (services.store, services.queue)
    found = Sweep(settings.cluster, *stores, services.coordinator, clock, note, settings.sweep_confirm_ms)
    done, new, first_unproven = Swept(), list[Unnamed](), ""
    async for each in found.run(age_ms, settings.staged_age_ms):
        if each.goes:
            done = done._replace(objects=done.objects + 1, bytes=done.bytes + each.size)
            counters.swept_objects += 1
            counters.swept_bytes += each.size
            continue
        if each.kept:
            done = done._replace(unproven=done.unproven + 1)
            first_unproven = first_unproven or each.key
            continue
        done = done._replace(pending=done.pending + 1, pending_bytes=done.pending_bytes + each.size)
        if each.new:
            counters.unnamed_objects += 1
            new += [each] if len(new) < NAMED_MAX else []
    await _end_deletions(services, found.forgotten.held)
    counters.kept_objects += found.kept
    if done.unproven > services.swept.unproven_objects:
        text = f"no batch has the records of {done.unproven} objects, the first is '{first_unproven}': they are kept"
        services.events.warning("sweep-unproven", text)
    services.swept.pending_objects, services.swept.pending_bytes = done.pending, done.pending_bytes
    services.swept.unproven_objects = done.unproven
    if done.objects:
        services.events.info("swept", f"{done.objects} unnamed objects, {done.bytes} bytes")
    if new:
        services.events.info("sweep-pending", pending_text(new, done, settings.sweep_confirm_ms))
    return done


async def _end_deletions(services: Services, forgotten: Mapping[str, ObjectTopic]) -> None:
    """Drop the logs of deleted topics that the coordinator has reported in two passes, far enough apart.

    The broker that deleted such a topic ended before it dropped the logs. Later passes delete the objects.
    """
    now_ms, since = services.deletion_clock.wall_ms(), services.deleted_since
    proven = {id_: topic for id_, topic in forgotten.items() if await services.coordinator.deleted(id_)}
    for topic_id in [topic_id for topic_id in since if topic_id not in proven]:
        del since[topic_id]
    for topic_id, topic in proven.items():
        if topic_id not in since:
            since[topic_id] = now_ms
        elif now_ms - since[topic_id] >= services.settings.sweep_confirm_ms:
            await services.queue.drop(await _logs_of(services, topic))
            services.events.info("logs-dropped", f"topic '{topic.name}' with id {topic_id} was deleted")


async def _logs_of(services: Services, topic: ObjectTopic) -> list[ReadPartition]:
    """Return the logs that the queue has of a topic; they are numbered without holes."""
    found = list[ReadPartition]()
    while True:
        partition = ReadPartition(topic.name, topic.id, len(found))
        try:
            await services.queue.span(partition)
        except NotFoundError:
            return found
        found.append(partition)


def pending_text(new: Sequence[Unnamed], done: Swept, confirm_ms: int) -> str:
    """Return the log line of the objects that a pass has found first; it names NAMED_MAX of them."""
    named = ", ".join(f"'{each.key}' ({each.why})" for each in new)
    return (
        f"{done.pending} objects of {done.pending_bytes} bytes wait, no pointer names them; a pass {confirm_ms} ms from"
        f" now deletes what it finds again of {named}; memq sweep --pending names all, --keep KEY keeps one"
    )

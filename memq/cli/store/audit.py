"""`memq audit`: reports lost, doubled and damaged records of a topic, and the verdict's basis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import click

from memq.audit.collector import audit as audit_topic
from memq.audit.opened_topic import opened_topic
from memq.audit.verdict import FindingCount, Verdict
from memq.cli.options import broker_options, brokers_of, json_option
from memq.cli.output import ProgressBar, count_text, print_json, print_message, print_table
from memq.cli.run import FAILED, OK
from memq.notification import Span
from memq.notification.remote import RemoteQueue
from memq.runtime.runtime import Runtime
from memq.settings import Value
from memq.topic import Topic, read_partitions

FINDINGS_SHOWN = 3
_BREAK = "\n" + " " * len("coverage: ")
FINDING_CHARS_MAX = 320  # --json has all of it


@click.command()
@click.argument("topic")
@broker_options
@json_option
def audit(topic: str, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Read all pointers and objects of TOPIC, and report lost, doubled and damaged records.

    Exits with 0 without findings. The verdict is then clean, or incomplete when some producers have not proven their
    end.
    """
    brokers = brokers_of(config, profile, flags)
    read = [0]
    try:
        verdict = asyncio.run(audit_by_brokers(brokers, topic, read))
    except KeyboardInterrupt:
        print_message(f"interrupted: {count_text(read[0], 'pointer')} read")
        raise
    if as_json:
        print_json(verdict.to_json())
    else:
        print_verdict(verdict)
    return OK if verdict.passed else FAILED


def print_verdict(verdict: Verdict) -> None:
    """Print a verdict as text: a line for each class of findings, the verdict, and its basis."""
    if verdict.findings:
        print_table(("finding", "count", "of", "where"), [_row(finding) for finding in verdict.findings])
        click.echo()
    click.echo(f"verdict: {verdict}")
    parts = str(verdict.coverage).split("; ")
    click.echo(f"coverage: {_BREAK.join(parts)}")


def _row(finding: FindingCount) -> tuple[object, ...]:
    shown = [_shortened(each.where) for each in finding.findings[:FINDINGS_SHOWN]]
    more = " …" if len(finding.findings) > FINDINGS_SHOWN else ""
    unit = count_text(finding.count, finding.kind.unit).split(" ", 1)[1]
    return (finding.kind.value, finding.count, unit, "; ".join(shown) + more)


def _shortened(text: str) -> str:
    return text if len(text) <= FINDING_CHARS_MAX else text[: FINDING_CHARS_MAX - 1] + "…"


async def audit_by_brokers(brokers: str, name: str, read: list[int]) -> Verdict:
    """Return the verdict on a topic; `read[0]` counts the pointers that are read so far.

    Raises: UnreachableError, NotFoundError.
    """
    async with opened_topic(brokers, name) as opened:
        with ProgressBar("audit", await _count_pointers(opened.queue, opened.topic)) as progress:
            moved, now_ms = _counter(read, progress), Runtime().clock.wall_ms()
            return await audit_topic(
                opened.topic,
                opened.queue,
                opened.read,
                now_ms,
                ask_held=opened.ask_held,
                ask_released=opened.ask_released,
                through=opened.through,
                moved=moved,
            )


async def _count_pointers(queue: RemoteQueue, topic: Topic) -> int:
    spans = await queue.spans(read_partitions(topic))
    return sum(span.end - span.begin for span in spans.values() if isinstance(span, Span))


def _counter(read: list[int], progress: ProgressBar) -> Callable[[int], None]:
    def moved(count: int) -> None:
        read[0] += count
        progress.move(count)

    return moved

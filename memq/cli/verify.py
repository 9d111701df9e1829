"""`memq verify`: whether objects hold what they say, byte for byte."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

from memq.audit.object_check import Verdict, check_object
from memq.cli.object_files import Found, find_objects
from memq.cli.options import broker_options, brokers_of, json_option, section_values, settings_of
from memq.cli.output import count_text, print_json, talk
from memq.errors import CorruptDataError, DeniedError
from memq.settings import Value

READS_MAX = 4  # further readings of an object that seems to be damaged


@dataclass(slots=True)
class Tally:
    """What was checked, and what is wrong: a finding names its object, the place in it, the error's code and text."""

    quiet: bool
    objects: int = 0
    blocks: int = 0
    records: int = 0
    findings: list[dict[str, object]] = field(default_factory=list)

    @property
    def damaged(self) -> int:
        """How many objects have a finding."""
        return len({finding["object"] for finding in self.findings})

    def find(self, name: str, place: dict[str, object], code: str, text: str) -> None:
        """Note what is wrong, and say it at once."""
        self.findings.append({"object": name, **place, "error": code, "text": text})
        if not self.quiet:
            click.echo(f"{name}: {' '.join(f'{what} {at}' for what, at in place.items())}: {text}")


@click.command()
@click.argument("targets", metavar="URI|FILE|FOLDER|TOPIC...", nargs=-1, required=True)
@broker_options
@json_option
def verify(
    targets: tuple[str, ...], as_json: bool, config: str | None, profile: str | None, **flags: Value | None
) -> None:
    """Check objects from end to end: trailer, index, every block's checksum and columns.

    A URI is file:///PATH or s3://BUCKET/KEY?endpoint=URL. A folder is checked with all that is below it; of a memq data
    folder that is its objects. A name without a path is a topic: it is read from its beginning as a consumer does. What
    was acked and is not there is no damage of an object: memq audit finds it.
    """
    tally = Tally(quiet=as_json)
    topics = [target for target in targets if _is_topic(target)]
    settings = settings_of(config, profile)
    section = settings.parts().section("s3")
    objects = [one for target in targets if target not in topics for one in find_objects(target, section).objects]
    try:
        with _progress(objects) as moving:
            for one in moving:
                _verify_object(one, tally)
        for topic in topics:
            try:
                _verify_topic(brokers_of(config, profile, flags), topic, section_values(settings, "s3"), tally)
            except DeniedError as error:
                hint = "memq verify reads the store itself: give it keys and a way there; memq audit asks a broker"
                raise DeniedError(str(error), hint=hint) from error
    except KeyboardInterrupt:
        talk(f"interrupted after {count_text(tally.objects, 'object')}")
        raise
    _report(tally, as_json=as_json)


def _is_topic(target: str) -> bool:
    """Whether a target is no path: nothing of that name is here, and it could not be elsewhere."""
    return not any(mark in target for mark in "/\\:") and not Path(target).exists()


def _verify_object(one: Found, tally: Tally) -> None:
    verdict = _verdict(one)
    tally.objects += 1
    tally.blocks += verdict.blocks
    tally.records += verdict.records
    for finding in verdict.findings:
        tally.find(one.name, {"offset": finding.offset}, finding.code, finding.text)


def _verdict(one: Found) -> Verdict:
    """Check an object; one that seems to be damaged is read again until two readings agree: bits flip on the way."""
    verdict = check_object(one.read())
    for _ in range(READS_MAX):
        if not verdict.findings:
            break
        last, verdict = verdict, check_object(one.read())
        if verdict.findings == last.findings:
            break
    return verdict


def _verify_topic(brokers: str, topic: str, s3: Mapping[str, object], tally: Tally) -> None:
    from memq.client.consumer import Consumer  # a file is verified without a network

    # Directly: a broker would answer from its memory for a store that is damaged.
    with Consumer(brokers, [topic], end="end", on_damaged="skip", on_expired="skip", read="direct", s3=s3) as consumer:
        for batch in consumer:
            tally.records += sum(1 for _ in batch)  # reads every column
            tally.objects += 1
            for damage in batch.damaged:
                place: dict[str, object] = {"position": str(damage.position), "block": damage.block}
                tally.find(damage.object_key, place, damage.cause.code, str(damage.cause))


def _report(tally: Tally, *, as_json: bool) -> None:
    """Print the sum. Raises: CorruptDataError when there are findings."""
    damaged = tally.damaged
    if as_json:
        counts: dict[str, object] = {"objects": tally.objects, "blocks": tally.blocks, "records": tally.records}
        print_json({**counts, "damaged": damaged, "findings": tally.findings})
    else:
        blocks = f", {count_text(tally.blocks, 'block')}" if tally.blocks else ""
        verdict = f"{damaged} damaged" if damaged else "all hold"
        records = count_text(tally.records, "record")
        click.echo(f"{count_text(tally.objects, 'object')}{blocks}, {records}: {verdict}")
    if damaged:
        raise CorruptDataError(f"{damaged} of {tally.objects:,} objects damaged", hint="see what is said above")


@contextlib.contextmanager
def _progress(objects: list[Found]) -> Iterator[Iterable[Found]]:
    """Show a bar on a terminal when there is much to do."""
    if len(objects) < 2 or not sys.stderr.isatty():
        yield objects
        return
    with click.progressbar(objects, label="verify", file=sys.stderr) as bar:
        yield bar

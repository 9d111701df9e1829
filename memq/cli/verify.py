"""`memq verify`: whether objects hold what they say, byte for byte."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from memq.cli.object_check import check_object
from memq.cli.object_files import files_of, path_of, read_object
from memq.cli.options import json_option
from memq.cli.output import count_text, print_json, size_text, talk
from memq.errors import CorruptDataError


@click.command()
@click.argument("targets", metavar="URI|FILE|FOLDER...", nargs=-1, required=True)
@json_option
def verify(targets: tuple[str, ...], as_json: bool) -> None:
    """Check objects from end to end: trailer, index, every block's checksum and columns.

    A folder is checked with all that is below it; of a memq data folder that is its objects. What was acked and is
    not there is no damage of an object: memq audit finds it.
    """
    paths = [file for target in targets for file in files_of(path_of(target))]
    totals = {"objects": 0, "bytes": 0, "blocks": 0, "records": 0}
    findings: list[dict[str, object]] = []
    try:
        with _progress(paths) as moving:
            for path in moving:
                _verify_one(path, totals, findings, quiet=as_json)
    except KeyboardInterrupt:
        talk(f"interrupted after {count_text(totals['objects'], 'object')} of {len(paths)}")
        raise
    damaged = len({finding["object"] for finding in findings})
    if as_json:
        print_json({**totals, "damaged": damaged, "findings": findings})
    else:
        click.echo(
            f"{count_text(totals['objects'], 'object')}, {size_text(totals['bytes'])}, "
            f"{count_text(totals['blocks'], 'block')}, {count_text(totals['records'], 'record')}: "
            + (f"{damaged} damaged" if damaged else "all hold")
        )
    if damaged:
        raise CorruptDataError(
            f"{damaged} of {count_text(len(paths), 'object')} damaged", hint="see what is said above"
        )


def _verify_one(path: Path, totals: dict[str, int], findings: list[dict[str, object]], *, quiet: bool) -> None:
    data = read_object(path)
    verdict = check_object(data)
    totals["objects"] += 1
    totals["bytes"] += len(data)
    totals["blocks"] += verdict.blocks
    totals["records"] += verdict.records
    for finding in verdict.findings:
        findings.append({"object": str(path), "offset": finding.offset, "error": finding.code, "text": finding.text})
        if not quiet:
            click.echo(f"{path}: at {finding.offset}: {finding.text}")


@contextlib.contextmanager
def _progress(paths: list[Path]) -> Iterator[Iterable[Path]]:
    """Show a bar on a terminal when there is much to do."""
    if len(paths) < 2 or not sys.stderr.isatty():
        yield paths
        return
    with click.progressbar(paths, label="verify", file=sys.stderr) as bar:
        yield bar

"""`memq keys`: the key file of encrypted records; `memq forget`: destroys the key of a subject."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from memq.cli.options import encryption_of_settings, json_option, setting_options, settings_of
from memq.cli.output import print_done, print_json, print_table
from memq.encryption.keys import create_key_file, key_ids, rotate_key_file
from memq.errors import InvalidSettingError
from memq.runtime.clock import SystemClock
from memq.settings import Value


@click.group()
def keys() -> None:
    """Make, rotate and list the keys of a key file, for --encryption file:FILE."""


_id_option = click.option("--id", "key_id", metavar="ID", help="Id of the new key; default: the present date and time.")


@keys.command()
@click.argument("file")
@_id_option
@json_option
def init(file: str, key_id: str | None, as_json: bool) -> None:
    """Make FILE with one new key. Producers and consumers need this file; brokers must not have it."""
    name = key_id or _new_id()
    create_key_file(Path(file), name)
    done = f"'{file}' has the key '{name}'; keep a copy: without it no record can be read"
    print_done(done, {"file": file, "key": name}, as_json=as_json)


@keys.command()
@click.argument("file")
@_id_option
@json_option
def rotate(file: str, key_id: str | None, as_json: bool) -> None:
    """Add a new key to FILE, which encrypts from now on. Earlier keys stay, for earlier records."""
    name = key_id or _new_id()
    rotate_key_file(Path(file), name)
    done = f"'{file}' encrypts with the key '{name}'; copy it to all consumers"
    print_done(done, {"file": file, "key": name}, as_json=as_json)


@keys.command("list")
@click.argument("file")
@json_option
def list_keys(file: str, as_json: bool) -> None:
    """List the ids of the keys in FILE, not the keys."""
    current, ids = key_ids(Path(file))
    if as_json:
        print_json([{"id": name, "current": name == current} for name in ids])
        return
    print_table(("key", "current"), [(name, "yes" if name == current else "") for name in ids])


@click.command()
@click.argument("subject")
@json_option
@setting_options("encryption", "subjects")
def forget(subject: str, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """Destroy the key of SUBJECT: no reader can read its records any more.

    The records stay, without value and headers, so audits stay exact. Backups of the file of subjects still have the
    key: delete those that are older than this command. It can't be undone.
    """
    encryption = encryption_of_settings(settings_of(config, profile, **flags).client())
    if encryption is None:
        raise InvalidSettingError("memq forget needs the keys", hint="pass --encryption and --subjects")
    key_id = encryption.subjects.forget(subject)
    done = f"the key {key_id} of '{subject}' is destroyed; also delete older backups of the file"
    print_done(done, {"subject": subject, "key": key_id}, as_json=as_json)


def _new_id() -> str:
    now = datetime.datetime.fromtimestamp(SystemClock().wall_ms() / 1_000, datetime.UTC)
    return now.strftime("%Y-%m-%d-%H%M%S")

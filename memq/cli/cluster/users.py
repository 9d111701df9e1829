"""`memq users`: users that log in with a password. No password is ever an argument of a command."""

from __future__ import annotations

import os

import click

from memq.cli.options import broker_options, brokers_of, json_option
from memq.cli.output import print_done, print_json, print_table
from memq.client.admin import Admin
from memq.errors import InvalidSettingError
from memq.settings import Value

_BYTES_MAX = 16_384


@click.group()
def users() -> None:
    """Add, remove and list the users that log in with a password."""


@users.command()
@click.argument("user")
@click.option("--password-file", metavar="FILE", help="File with the password, instead of a prompt.")
@click.option("--password-env", metavar="VARIABLE", help="Variable of the environment with the password.")
@broker_options
@json_option
def add(
    user: str,
    password_file: str | None,
    password_env: str | None,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Add USER, or give it another password. Brokers never get the password itself."""
    brokers = brokers_of(config, profile, flags)
    password = _password(password_file, password_env)
    with Admin(brokers) as admin:
        admin.put_user(user, password)
    print_done(f"user '{user}' has a password; brokers know it within 5 s", {"user": user}, as_json=as_json)


@users.command()
@click.argument("user")
@broker_options
@json_option
def remove(user: str, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """Remove USER; brokers close its connections within 5 s."""
    with Admin(brokers_of(config, profile, flags)) as admin:
        admin.remove_user(user)
    print_done(f"user '{user}' is removed", {"user": user}, as_json=as_json)


@users.command("list")
@broker_options
@json_option
def list_users(as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """List the names of all users."""
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = admin.users()
    if as_json:
        print_json(found)
        return
    print_table(("user",), [(name,) for name in found])


def _password(file: str | None, variable: str | None) -> str:
    """Return the new password. Raises: InvalidSettingError."""
    if variable is not None:
        if not os.environ.get(variable):
            raise InvalidSettingError(f"variable {variable} has no password", hint="set it, or use --password-file")
        return os.environ[variable]
    if file is None:
        return str(click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))
    try:
        with open(file, encoding="utf-8") as opened:
            return opened.read(_BYTES_MAX).rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise InvalidSettingError(f"can't read the password in '{file}'", hint="check path and rights") from error

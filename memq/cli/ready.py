"""Parts of serving commands: the listening address, and the ready line."""

from __future__ import annotations

import sys

import click

from memq.errors import InvalidSettingError, UnreachableError
from memq.runtime.network import Address, parse_address


def say_ready(address: str) -> None:
    """Print `memq ready: HOST:PORT` at once, also into a pipe."""
    click.echo(f"memq ready: {address}")
    sys.stdout.flush()


def listen_address(text: str, default_port: int) -> Address:
    """Return where a command shall listen. Raises: InvalidSettingError."""
    try:
        return parse_address(text, default_port)
    except UnreachableError as error:
        raise InvalidSettingError(str(error), hint=error.hint) from error

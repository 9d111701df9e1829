"""The line that says that clients can come, for the programs that wait for it."""

from __future__ import annotations

import sys

import click


def say_ready(address: str) -> None:
    """Print `memq ready: HOST:PORT` at once, also into a pipe."""
    click.echo(f"memq ready: {address}")
    sys.stdout.flush()

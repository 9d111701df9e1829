"""`memq config`: the settings as they are now, and where each comes from."""

from __future__ import annotations

import click

from memq.cli.options import json_option, settings_of, settings_options, shown_value
from memq.cli.output import print_json, print_table
from memq.settings import RULES


@click.command()
@click.option("--show-origin", is_flag=True, help="Say where each value comes from.")
@json_option
@settings_options
def config(show_origin: bool, as_json: bool, config: str | None, profile: str | None) -> None:
    """Show the settings.

    A flag wins over the environment (MEMQ_PORT), that over the settings file, that over the default.
    """
    settings = settings_of(config, profile)
    if as_json:
        plain = dict(settings.values)
        full = {name: {"value": value, "origin": settings.origins[name]} for name, value in plain.items()}
        print_json(full if show_origin else plain)
        return
    if show_origin:
        rows = [(name, shown_value(name, value), settings.origins[name]) for name, value in settings.values.items()]
        print_table(("setting", "value", "origin"), rows)
    else:
        rows = [(name, shown_value(name, value), RULES[name].doc) for name, value in settings.values.items()]
        print_table(("setting", "value", "meaning"), rows)

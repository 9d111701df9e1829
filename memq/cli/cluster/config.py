"""`memq config`: the settings as they are now, and where each comes from."""

from __future__ import annotations

import re

import click

from memq.cli.options import json_option, settings_of, settings_options, shown_value
from memq.cli.output import print_json, print_table
from memq.settings import RULES

_SECRET = re.compile("secret|password|token|credential|sasl.jaas|auth", re.IGNORECASE)  # values that nobody prints


@click.command()
@click.option("--show-origin", is_flag=True, help="Show the origin of each value.")
@json_option
@settings_options
def config(show_origin: bool, as_json: bool, config: str | None, profile: str | None) -> None:
    """Show the settings.

    Flags override the environment (MEMQ_PORT), which overrides the settings file, which overrides the defaults.
    """
    settings = settings_of(config, profile)
    sections = {
        f"{section}.{name}": ("***" if _SECRET.search(name) else value, origin)
        for section, named in settings.sections.items()
        for name, (value, origin) in named.items()
    }
    if as_json:
        plain: dict[str, object] = {**settings.values, **{name: value for name, (value, _) in sections.items()}}
        origins = {**settings.origins, **{name: origin for name, (_, origin) in sections.items()}}
        full = {name: {"value": value, "origin": origins[name]} for name, value in plain.items()}
        print_json(full if show_origin else plain)
        return
    if show_origin:
        rows = [(name, shown_value(name, value), settings.origins[name]) for name, value in settings.values.items()]
        rows += [(name, str(value), origin) for name, (value, origin) in sections.items()]
        print_table(("setting", "value", "origin"), rows)
    else:
        rows = [(name, shown_value(name, value), RULES[name].doc) for name, value in settings.values.items()]
        rows += [(name, str(value), "of this section") for name, (value, _) in sections.items()]
        print_table(("setting", "value", "meaning"), rows)

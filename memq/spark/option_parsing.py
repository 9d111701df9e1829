"""Parsing shared by read and write options: names in any case, no secrets, choices. Pure.

There are no options for keys and passwords: options stand in plans and logs. Those come from where clients find them,
on every machine: the environment, the settings file, the role.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from memq.errors import InvalidSettingError, UnknownSettingError
from memq.settings import did_you_mean

_SECRET = re.compile(r"secret|password|token|access.?key|sasl", re.IGNORECASE)


def read_given(given: Mapping[str, str], spelling: Mapping[str, str], foreign: tuple[str, ...] = ()) -> dict[str, str]:
    """Return what was given by lower-case names.

    `spelling` has those that there are, as people write them.
    `foreign` are passed over: they are Spark's own. Raises: UnknownSettingError with a "did you mean".
    """
    normalized = {name.lower(): value.strip() for name, value in given.items() if name.lower() not in foreign}
    for name in normalized:
        if name in spelling:
            continue
        if _SECRET.search(name):
            raise UnknownSettingError(
                f"option '{name}' is not taken: options stand in plans and logs",
                hint="give keys by the environment of every machine, or by the file that option 'config' names",
            )
        raise UnknownSettingError(f"unknown option '{name}'", hint=did_you_mean(name, tuple(spelling.values())))
    return normalized


def read_choice(normalized: Mapping[str, str], name: str, spelled: str, choices: tuple[str, ...]) -> str:
    """Return one of `choices`, the first when nothing was said. Raises: InvalidSettingError."""
    value = normalized.get(name, choices[0])
    if value.lower() not in choices:
        raise InvalidSettingError(
            f"option '{spelled}' = '{value[:60]}' is none of {', '.join(choices)}", hint=did_you_mean(value, choices)
        )
    return value.lower()

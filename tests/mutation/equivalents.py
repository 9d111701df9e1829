"""Known equivalents: mutants that no user could notice, each with its reason, matched by content."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from tests.mutation.mutant import Mutant

FILE = Path(__file__).with_name("equivalents.toml")


class Equivalent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """In `function` of `path`, `old` may become `new`: it makes no difference, for this reason.

    `operator` alone instead of `old` and `new` covers all mutants that it makes in the function. `line`, a part of the
    line that changes, chooses among several that are alike.
    """

    path: str
    function: str
    reason: str
    old: str = ""
    new: str = ""
    operator: str = ""
    line: str = ""

    def covers(self, mutant: Mutant) -> bool:
        """Whether this is the mutant, or one of those, that is meant."""
        if (self.path, self.function) != (mutant.path, mutant.function):
            return False
        if self.operator and self.operator != mutant.operator:
            return False
        if self.line and self.line not in mutant.diff():
            return False
        return not self.old or (self.old, self.new) == (mutant.old, mutant.new)


def load_equivalents() -> list[Equivalent]:
    """Return the list."""
    with FILE.open("rb") as file:
        return msgspec.convert(tomllib.load(file).get("equivalent", []), list[Equivalent])


def reason_of(mutant: Mutant, known: list[Equivalent]) -> str:
    """Return why a mutant is equivalent, "" when it is not known to be."""
    return next((equivalent.reason for equivalent in known if equivalent.covers(mutant)), "")

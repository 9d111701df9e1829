"""Mutants made by hand: each breaks one rule of the protocol, by a patch that finds its text exactly once."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from tests.mutation.mutant import BY_HAND, ROOT, Mutant, function_at
from tests.mutation.rules_of_access import ACCESS_RULES
from tests.mutation.rules_of_brokers import BROKER_RULES
from tests.mutation.rules_of_clients import CLIENT_RULES
from tests.mutation.rules_of_logs import LOG_RULES


@dataclass(frozen=True, slots=True)
class Patch:
    """In `path`, `old` becomes `new`; `reason` says in one line which rule that breaks."""

    path: str
    reason: str
    old: str
    new: str

    def mutant(self) -> Mutant:
        """Return the mutant. The patch must apply: its text is there, once."""
        data = (ROOT / self.path).read_text(encoding="utf-8")
        count = data.count(self.old)
        assert count == 1, f"{self.path}: '{self.old}' is there {count} times: plant '{self.reason}' again"
        start = len(data[: data.index(self.old)].encode())
        line = data.count("\n", 0, data.index(self.old)) + 1
        first = line + len(self.old) - len(self.old.lstrip("\n"))
        function = function_at(ast.parse(data), first)
        end = start + len(self.old.encode())
        return Mutant(self.path, function, first, BY_HAND, start, end, self.old, self.new, reason=self.reason)


PATCHES = tuple(Patch(*rule) for rule in (*BROKER_RULES, *LOG_RULES, *CLIENT_RULES, *ACCESS_RULES))


def hand_made() -> list[Mutant]:
    """Return the mutants of all patches."""
    return [patch.mutant() for patch in PATCHES]

"""Rules of permissions in runs: what everybody may do, what is withdrawn, and decisions that share no code of memq."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memq.permissions import AccessRule, ResourceKind, RuleSet

KINDS = ("topic", "group", "queue", "transactional-id", "producer-group", "cluster")
ALLOWED = RuleSet(
    version=1,
    rules=tuple(
        sorted(AccessRule(effect="allow", principal="*", permission="all", kind=kind, name="*") for kind in KINDS)
    ),
)
KNOWN_S = 5.0  # after which a change is effective (docs/permissions.md)


def _deny(principal: str, permission: str, kind: ResourceKind, name: str = "*") -> AccessRule:
    return AccessRule(effect="deny", principal=principal, permission=permission, kind=kind.value, name=name)


WITHDRAWN = (
    _deny("consumer-*", "read", ResourceKind.TOPIC, "t"),
    _deny("consumer-0", "read", ResourceKind.TOPIC),
    _deny("consumer-*", "read", ResourceKind.GROUP),
    _deny("ward-*", "write", ResourceKind.TOPIC),
    _deny("ward-*", "write", ResourceKind.TOPIC, "gra*"),
    _deny("worker-*", "read", ResourceKind.QUEUE),
    _deny("worker-1", "read", ResourceKind.QUEUE),
    _deny("popper-*", "read", ResourceKind.QUEUE),
    _deny("producer-*", "write", ResourceKind.QUEUE),
)


@dataclass(frozen=True, slots=True)
class Wish:
    """A permission of a principal on a resource, as rules name it."""

    principal: str
    permission: str
    kind: str
    name: str

    def is_denied(self, rules: RuleSet) -> bool:
        """Whether a rule denies it. All else is allowed by `ALLOWED`."""
        return any(
            rule.effect == "deny"
            and (rule.permission, rule.kind) == (self.permission, self.kind)
            and _fits(rule.principal, self.principal)
            and _fits(rule.name, self.name)
            for rule in rules.rules
        )


PROBES = (
    Wish("consumer-0", "read", "topic", "t"),
    Wish("consumer-1", "read", "topic", "t"),
    Wish("consumer-1", "read", "group", "g0"),
    Wish("ward-0", "write", "topic", "granted"),
    Wish("ward-0", "write", "topic", "t"),
    Wish("worker-1", "read", "queue", "q"),
    Wish("worker-2", "read", "queue", "q"),
    Wish("producer-0", "write", "queue", "q"),
)


def _fits(pattern: str, text: str) -> bool:
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern


class RuleHistory:
    """The rules at the coordinator over time."""

    def __init__(self) -> None:
        self._known: list[tuple[float, RuleSet]] = []

    def note(self, now_s: float, rules: RuleSet) -> None:
        """Note the rules of now."""
        if not self._known or self._known[-1][1] != rules:
            self._known.append((now_s, rules))

    def between(self, since_s: float, now_s: float) -> Sequence[RuleSet]:
        """Return all rules that were stored at some time since `since_s`."""
        return list(self._between(since_s, now_s))

    def _between(self, since_s: float, now_s: float) -> Iterator[RuleSet]:
        ends = [begin for begin, _ in self._known[1:]] + [now_s]
        for (_, rules), end in zip(self._known, ends, strict=True):
            if end >= since_s:
                yield rules

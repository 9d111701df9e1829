"""The changes that make a cluster agree with a declaration: planned first, then made in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from memq.cli.cluster.setting_text import setting_text
from memq.cli.declared.declaration import Declaration, DeclaredGroup, DeclaredTopic
from memq.client.admin import AsyncAdmin
from memq.errors import InvalidRequestError, NotFoundError
from memq.quotas import QuotaRule
from memq.topic import Topic, parse_settings

Sign = Literal["+", "~", "-"]


@dataclass(frozen=True, slots=True)
class Change:
    """One change: `+` adds, `~` alters, `-` removes."""

    sign: Sign
    text: str
    make: Callable[[AsyncAdmin], Awaitable[Any]]

    def __str__(self) -> str:
        return f"{self.sign} {self.text}"


async def plan_changes(admin: AsyncAdmin, declared: Declaration, *, prune: bool) -> list[Change]:
    """Return the changes that are left to make.

    `prune` removes rules and quotas that the file leaves out, if it has such a section. Topics and groups stay.
    Raises: InvalidRequestError for what can't be changed; DeniedError.
    """
    topics = {topic.name: topic for topic in await admin.topics()}
    changes = [each for topic in declared.topics for each in _topic_changes(topic, topics.get(topic.name))]
    new = {topic.name for topic in declared.topics} - set(topics)
    for group in declared.groups:
        for topic in group.topics:
            if topic not in topics and topic not in new:
                raise NotFoundError(f"topic '{topic}' of group '{group.name}' does not exist", hint="declare it, too")
            if topic in new or await _missing(admin, group, topic):
                changes.append(_positions(group, topic))
    if "permissions" in declared.sections:
        changes += await _rule_changes(admin, declared, prune=prune)
    if "quotas" in declared.sections:
        changes += await _quota_changes(admin, declared, prune=prune)
    return changes


def _topic_changes(declared: DeclaredTopic, found: Topic | None) -> list[Change]:
    name, settings = declared.name, dict(declared.settings)
    if found is None:
        named = [
            f"partitions = {declared.partitions}",
            *(f"{key} = {setting_text(key, each)}" for key, each in settings.items()),
        ]
        return [
            Change(
                "+",
                f"topic '{name}': {', '.join(named)}",
                lambda admin: admin.create_topic(name, partitions=declared.partitions, settings=settings),
            )
        ]
    if len(found.taking) < declared.partitions:
        raise InvalidRequestError(
            f"topic '{name}' has {len(found.taking)} partitions, and the file wants {declared.partitions}",
            hint="a topic gets them at its creation; the setting write_partitions_max lets the governor add some",
        )
    before = msgspec.structs.asdict(found.settings)
    after = msgspec.structs.asdict(parse_settings(settings, found.settings))
    differ = [key for key in before if before[key] != after[key]]
    if not differ:
        return []
    text = ", ".join(f"{key} {setting_text(key, before[key])} -> {setting_text(key, after[key])}" for key in differ)
    changed = {key: settings[key] for key in differ if key in settings}
    return [Change("~", f"topic '{name}': {text}", lambda admin: admin.alter_topic(name, settings=changed))]


async def _missing(admin: AsyncAdmin, group: DeclaredGroup, topic: str) -> bool:
    """Whether the group has no position in some partition of a topic."""
    resets = await admin.reset_group(group.name, topic, group.start, dry_run=True, new_ok=True)
    return any(each.before is None for each in resets)


def _positions(group: DeclaredGroup, topic: str) -> Change:
    async def make(admin: AsyncAdmin) -> None:
        resets = await admin.reset_group(group.name, topic, group.start, dry_run=True, new_ok=True)
        missing = {tuple(each.topic_partition): each.after for each in resets if each.before is None}
        await admin.reset_group(group.name, topic, missing, new_ok=True)  # type: ignore[arg-type]

    return Change("+", f"group '{group.name}': positions in topic '{topic}', from {group.start}", make)


async def _rule_changes(admin: AsyncAdmin, declared: Declaration, *, prune: bool) -> list[Change]:
    found = await admin.permissions()
    added = [rule for rule in dict.fromkeys(declared.rules) if rule not in found]
    gone = [rule for rule in found if prune and rule not in declared.rules]
    changes = [
        Change("+", str(rule), lambda admin, rule=rule: admin.change_permissions(add=[rule]))  # type: ignore[misc]
        for rule in added
    ]
    return changes + [
        Change("-", str(rule), lambda admin, rule=rule: admin.change_permissions(remove=[rule]))  # type: ignore[misc]
        for rule in gone
    ]


async def _quota_changes(admin: AsyncAdmin, declared: Declaration, *, prune: bool) -> list[Change]:
    found = {(each.kind, each.name): each for each in await admin.quotas()}
    wanted = {(each.kind, each.name): each for each in declared.quotas}

    def put(quota: QuotaRule) -> Callable[[AsyncAdmin], Awaitable[Any]]:
        return lambda admin: admin.change_quotas(put=[quota])

    def remove(quota: QuotaRule) -> Callable[[AsyncAdmin], Awaitable[Any]]:
        return lambda admin: admin.change_quotas(remove=[quota])

    changes = [
        Change("~" if key in found else "+", f"quota of {quota}", put(quota))
        for key, quota in wanted.items()
        if found.get(key) != quota
    ]
    gone = [quota for key, quota in found.items() if prune and key not in wanted]
    return changes + [Change("-", f"quota of {quota}", remove(quota)) for quota in gone]

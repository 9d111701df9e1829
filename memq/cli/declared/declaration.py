"""The file of `memq apply`: TOML, parsed and checked without a broker."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from memq.cli.cluster.acl import rules_named
from memq.cli.cluster.topic import parse_topic_settings
from memq.cli.options import Point, parse_reset_target
from memq.errors import InvalidRequestError, MemqError, NotFoundError
from memq.limits import PARTITIONS_MAX
from memq.patterns import EVERY
from memq.permissions import KINDS, AccessRule, ResourceKind
from memq.quotas import QuotaRule
from memq.settings import did_you_mean, parse_size
from memq.topic import check_group, check_name

SECTIONS = ("topics", "groups", "permissions", "quotas")
_AMOUNTS = tuple(each for each in QuotaRule.__struct_fields__ if each not in ("kind", "name"))


@dataclass(frozen=True, slots=True)
class DeclaredTopic:
    """A topic that must exist: write partitions at its creation, and the settings that the file names."""

    name: str
    partitions: int
    settings: Mapping[str, int | bool | str]


@dataclass(frozen=True, slots=True)
class DeclaredGroup:
    """A group that must have a position in every partition of its topics; `start` is where it gets one."""

    name: str
    topics: tuple[str, ...]
    start: Point


@dataclass(slots=True)
class Declaration:
    """The content of a file. `sections` are those that it has: pruning leaves others alone."""

    topics: list[DeclaredTopic] = field(default_factory=list)
    groups: list[DeclaredGroup] = field(default_factory=list)
    rules: list[AccessRule] = field(default_factory=list)
    quotas: list[QuotaRule] = field(default_factory=list)
    sections: frozenset[str] = frozenset()


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    topics: tuple[str, ...]
    start: str = "beginning"


class _Permission(msgspec.Struct, forbid_unknown_fields=True, rename="kebab"):
    principal: str
    permission: str | None = None
    role: str | None = None
    effect: Literal["allow", "deny"] = "allow"
    cluster: bool = False
    topic: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    queue: tuple[str, ...] = ()
    transactional_id: tuple[str, ...] = ()
    producer_group: tuple[str, ...] = ()


def read_declaration(file: str, now_ms: int) -> Declaration:
    """Read a file. Raises: NotFoundError; InvalidRequestError that names the part of the file."""
    try:
        values = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFoundError(f"no file '{file}'", hint="check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{file} is not TOML: {error}", hint="see docs/cli.md, Declared state") from error
    return parse_declaration(values, file, now_ms)


def parse_declaration(values: Mapping[str, Any], file: str, now_ms: int) -> Declaration:
    """Return the checked content of a file. Raises: InvalidRequestError that names the part of the file."""
    for section in values:
        if section not in SECTIONS:
            raise InvalidRequestError(f"{file}: unknown section '{section}'", hint=did_you_mean(section, SECTIONS))
    found = Declaration(sections=frozenset(values))
    for name, value in _tables(values, "topics", file):
        found.topics.append(_named(file, f"topics.{name}", lambda name=name, value=value: _topic(name, value)))
    for name, value in _tables(values, "groups", file):
        found.groups.append(_named(file, f"groups.{name}", lambda name=name, value=value: _group(name, value, now_ms)))
    for name, value in _tables(values, "quotas", file):
        found.quotas.append(_named(file, f"quotas.{name}", lambda name=name, value=value: _quota(name, value)))
    permissions = values.get("permissions", [])
    if not isinstance(permissions, list):
        raise InvalidRequestError(f"{file}: permissions is no list", hint="write [[permissions]] before each")
    for number, value in enumerate(permissions, start=1):
        found.rules += _named(file, f"permissions, entry {number}", lambda value=value: _rules(value))
    return found


def _tables(values: Mapping[str, Any], section: str, file: str) -> list[tuple[str, dict[str, Any]]]:
    tables = values.get(section, {})
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise InvalidRequestError(f"{file}: {section} has no tables", hint=f"write [{section}.NAME]")
    return list(tables.items())


def _named(file: str, part: str, parse: Any) -> Any:
    """Return a parsed part of the file; errors name it."""
    try:
        return parse()
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{file}: {part}: {error}", hint="see docs/cli.md, Declared state") from error
    except MemqError as error:
        raise InvalidRequestError(f"{file}: {part}: {error}", hint=error.hint) from error


def _topic(name: str, value: dict[str, Any]) -> DeclaredTopic:
    check_name(name)
    partitions = value.get("partitions", 1)
    if not isinstance(partitions, int) or not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidRequestError(f"partitions = {partitions!r} is not within 1 to {PARTITIONS_MAX}")
    texts = tuple(f"{key}={_text(each)}" for key, each in value.items() if key != "partitions")
    return DeclaredTopic(name, partitions, parse_topic_settings(texts))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _group(name: str, value: dict[str, Any], now_ms: int) -> DeclaredGroup:
    check_group(name)
    found = msgspec.convert(value, _Group)
    for topic in found.topics:
        check_name(topic)
    return DeclaredGroup(name, found.topics, parse_reset_target(found.start, now_ms))


def _quota(name: str, value: dict[str, Any]) -> QuotaRule:
    amounts: dict[str, Any] = {}
    for key, given in value.items():
        if key not in _AMOUNTS:
            raise InvalidRequestError(f"unknown amount '{key}'", hint=did_you_mean(key, _AMOUNTS))
        amount = given if isinstance(given, int) else parse_size(str(given))
        if amount is None or isinstance(given, bool) or amount < 0:
            raise InvalidRequestError(
                f"{key} = {given!r} can't be read", hint="write a number, or a size such as 10MiB"
            )
        amounts[key] = amount
    return QuotaRule(name=name, **amounts)


def _rules(value: object) -> list[AccessRule]:
    found = msgspec.convert(value, _Permission)
    names: dict[ResourceKind, tuple[str, ...]] = {
        kind: getattr(found, kind.name.lower()) for kind in KINDS if kind is not ResourceKind.CLUSTER
    }
    names[ResourceKind.CLUSTER] = (EVERY,) if found.cluster else ()
    return rules_named(found.effect, found.principal, found.permission, found.role, names)

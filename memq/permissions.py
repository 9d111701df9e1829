"""Permissions: rules, roles, and the decision on a request. Pure.

A rule allows or denies one permission on resources to principals. A deny wins over each allow, and what no rule allows
is denied. The coordinator keeps the rules; brokers decide by them (`memq.broker.permissions.checks`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Literal, NamedTuple

import msgspec

from memq.errors import InvalidRequestError, TooLargeError
from memq.format.report import AUDIT_TOPIC
from memq.limits import KIB
from memq.namespaces import Namespace, check_namespace
from memq.patterns import EVERY, PatternMap, check_pattern, matches
from memq.quotas import QuotaRule, check_quota
from memq.scram import Credential, check_credential
from memq.topic import NAMESPACE_END

RULES_BYTES_MAX = 512 * KIB  # of all rules, encoded: a node of ZooKeeper takes 1 MiB


class Permission(Enum):
    """The permissions that a rule can allow or deny."""

    __hash__ = object.__hash__  # in C: each request needs it

    READ = "read"  # records of a topic, items of a queue; membership and positions of a group
    WRITE = "write"
    DESCRIBE = "describe"  # a rule that allows read, write, alter or delete allows it, too
    CREATE = "create"
    ALTER = "alter"
    DELETE = "delete"
    OPERATE = "operate"  # brokers and rules of a cluster
    PEER = "peer"  # requests of brokers to each other
    ALL = "all"  # each of the others but `peer`; only in rules


class ResourceKind(Enum):
    """Kinds of objects that a permission can name."""

    __hash__ = object.__hash__

    CLUSTER = "cluster"
    TOPIC = "topic"
    PARTITION = "partition"  # has the permissions of its topic
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"
    PRODUCER_GROUP = "producer-group"
    QUEUE = "queue"
    OBJECT = "object"  # of a store; it may hold batches of several topics, and has their permissions


KINDS = tuple(kind for kind in ResourceKind if kind not in (ResourceKind.PARTITION, ResourceKind.OBJECT))  # of rules
_IMPLY_DESCRIBE = tuple(each.value for each in (Permission.READ, Permission.WRITE, Permission.ALTER, Permission.DELETE))
# The permissions of rules that deny a permission, and of those that allow it.
_COVERING = {
    each: (each.value,) if each in (Permission.PEER, Permission.ALL) else (each.value, Permission.ALL.value)
    for each in Permission
}
_ALLOWING = {
    each: (*names, *_IMPLY_DESCRIBE) if each is Permission.DESCRIBE else names for each, names in _COVERING.items()
}


class Resource(NamedTuple):
    """The object of a permission: `clicks`, `clicks/3`, `main/<object key>`; "" for the cluster."""

    kind: ResourceKind
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value} '{self.name}'" if self.name else self.kind.value


def topic_resource(name: str) -> Resource:
    """Return the resource of a topic."""
    return Resource(ResourceKind.TOPIC, name)


class AccessRule(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Allows or denies a permission on resources of a kind to principals.

    `principal` and `name` are exact, or a prefix with a final `*`; the `name` of the cluster is `*`.
    """

    effect: Literal["allow", "deny"]
    principal: str
    permission: str
    kind: str
    name: str

    def __str__(self) -> str:
        on = self.kind if self.kind == ResourceKind.CLUSTER.value else f"{self.kind} '{self.name}'"
        return f"{self.effect} {self.principal} {self.permission} {on}"


class RuleSet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All rules, quotas, users and namespaces of a cluster.

    Each change has the next version; version 0 has none.

    `decoys` is the secret, in hex, by which brokers answer logins of unknown users alike.
    """

    version: int = 0
    rules: tuple[AccessRule, ...] = ()
    quotas: tuple[QuotaRule, ...] = ()
    users: tuple[Credential, ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    decoys: str = ""


class AccessDecision(NamedTuple):
    """Whether a request is allowed, and the rule that decided; None if no rule matches."""

    allowed: bool
    rule: AccessRule | None = None


def check_rule(rule: AccessRule) -> AccessRule:
    """Return a rule if it is valid. Raises: InvalidRequestError."""
    named_permission(rule.permission)
    named_kind(rule.kind)
    check_pattern("principal", rule.principal)
    check_pattern("name", rule.name)
    if rule.kind == ResourceKind.CLUSTER.value and rule.name != EVERY:
        raise InvalidRequestError(f"a rule of the cluster has the name '{rule.name[:60]}'; it can be '*' only")
    return rule


def named_permission(name: str) -> Permission:
    """Return the permission with this name. Raises: InvalidRequestError."""
    try:
        return Permission(name)
    except ValueError:
        raise InvalidRequestError(
            f"permission {name[:60]!a} does not exist", hint=f"one of {', '.join(each.value for each in Permission)}"
        ) from None


def named_kind(name: str) -> ResourceKind:
    """Return the kind of resources with this name, if rules can have it. Raises: InvalidRequestError."""
    for kind in KINDS:
        if kind.value == name:
            return kind
    raise InvalidRequestError(
        f"kind of resource {name[:60]!a} does not exist", hint=f"one of {', '.join(each.value for each in KINDS)}"
    )


def changed_rules(stored: RuleSet, add: Iterable[AccessRule], remove: Iterable[AccessRule]) -> RuleSet:
    """Return the rules after a change: with the next version, or `stored` itself when nothing changes.

    Raises: InvalidRequestError for an invalid rule; TooLargeError over RULES_BYTES_MAX.
    """
    kept = dict.fromkeys(stored.rules)
    for rule in remove:
        kept.pop(rule, None)
    kept |= dict.fromkeys(check_rule(rule) for rule in add)
    if kept.keys() == dict.fromkeys(stored.rules).keys():
        return stored
    rules = tuple(sorted(kept))
    return check_size(msgspec.structs.replace(stored, version=stored.version + 1, rules=rules))


def changed_quotas(stored: RuleSet, put: Iterable[QuotaRule], remove: Iterable[QuotaRule]) -> RuleSet:
    """Return the rules after quotas were set and removed, as `changed_rules`.

    Kind and name name the quotas in `remove`.
    Raises: InvalidRequestError for a quota that is not sound; TooLargeError over RULES_BYTES_MAX.
    """
    kept = {(quota.kind, quota.name): quota for quota in stored.quotas}
    for quota in remove:
        kept.pop((quota.kind, quota.name), None)
    kept |= {(quota.kind, quota.name): check_quota(quota) for quota in put}
    quotas = tuple(sorted(kept.values()))
    if quotas == stored.quotas:
        return stored
    return check_size(msgspec.structs.replace(stored, version=stored.version + 1, quotas=quotas))


def changed_namespaces(stored: RuleSet, put: Iterable[Namespace], remove: Iterable[str]) -> RuleSet:
    """Return the rule set after namespaces were set and removed, as `changed_rules`.

    Raises: as `check_namespace`; TooLargeError over RULES_BYTES_MAX.
    """
    kept = {each.name: each for each in stored.namespaces}
    for name in remove:
        kept.pop(name, None)
    kept |= {each.name: check_namespace(each) for each in put}
    namespaces = tuple(kept[name] for name in sorted(kept))
    if namespaces == stored.namespaces:
        return stored
    return check_size(msgspec.structs.replace(stored, version=stored.version + 1, namespaces=namespaces))


def changed_users(stored: RuleSet, put: Iterable[Credential], remove: Iterable[str], decoys: str) -> RuleSet:
    """Return the rule set after a change of users: with the next version, or `stored` itself.

    `decoys` is taken if there is none yet. Raises: InvalidRequestError for a credential that is not sound;
    TooLargeError over RULES_BYTES_MAX.
    """
    kept = {each.user: each for each in stored.users}
    for user in remove:
        kept.pop(user, None)
    kept |= {each.user: check_credential(each) for each in put}
    users = tuple(sorted(kept.values()))
    if users == stored.users:
        return stored
    secret = stored.decoys or decoys
    return check_size(msgspec.structs.replace(stored, version=stored.version + 1, users=users, decoys=secret))


def check_size(changed: RuleSet) -> RuleSet:
    """Return rules that are not too large for a coordinator. Raises: TooLargeError."""
    size = len(encode_rules(changed))
    if size > RULES_BYTES_MAX:
        raise TooLargeError(
            f"the rules and users would have {size} bytes, {RULES_BYTES_MAX} are allowed",
            hint="name resources and principals by prefixes, for example 'team.*'",
        )
    return changed


def encode_rules(rules: RuleSet) -> bytes:
    """Return the bytes of rules, as coordinators keep them."""
    return msgspec.json.encode(rules)


def decode_rules(data: bytes) -> RuleSet:
    """Return the rules and quotas in these bytes.

    Raises: msgspec.MsgspecError; UnicodeDecodeError; InvalidRequestError for one that is not sound.
    """
    found = msgspec.json.decode(data, type=RuleSet)
    for rule in found.rules:
        check_rule(rule)
    for quota in found.quotas:
        check_quota(quota)
    for namespace in found.namespaces:
        check_namespace(namespace)
    return found


def permission_subject(resource: Resource) -> Resource:
    """Return the resource that rules name: the topic of a partition."""
    if resource.kind is ResourceKind.PARTITION:
        return topic_resource(resource.name.rpartition("/")[0])
    return resource


class _Named:
    """The rules of one kind, principal and name: the first one of each effect and permission."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], tuple[int, AccessRule]] = {}  # with the place among all rules

    def add(self, place: int, rule: AccessRule) -> None:
        """Take a rule."""
        self._first.setdefault((rule.effect, rule.permission), (place, rule))

    def find(self, effect: str, permissions: Sequence[str]) -> Iterator[tuple[int, AccessRule]]:
        """Return the first rules with this effect on one of the permissions."""
        return (found for each in permissions if (found := self._first.get((effect, each))) is not None)


class _OfPrincipal:
    """The rules of one kind and principal: by name, and those of all names together."""

    def __init__(self) -> None:
        self.by_name = PatternMap(_Named)
        self.all = _Named()


class RuleIndex:
    """Decides by rules: a deny wins, and a request without a matching rule is denied.

    Rules are found by principal and name, so a decision does not scan those of others.
    """

    def __init__(self, rules: Iterable[AccessRule]) -> None:
        self._kinds: dict[str, PatternMap[_OfPrincipal]] = {}
        for place, rule in enumerate(rules):
            kind = self._kinds.setdefault(rule.kind, PatternMap(_OfPrincipal))
            of_principal = kind.at(rule.principal)
            of_principal.all.add(place, rule)
            of_principal.by_name.at(rule.name).add(place, rule)

    def decide(self, principal: str, permission: Permission, resource: Resource) -> AccessDecision:
        """Decide on one resource."""
        kind, name = permission_subject(resource)
        matching = [named for each in self._of(kind, principal) for named in each.by_name.matching(name)]
        return _decision(permission, matching, matching)

    def decide_on_all(self, principal: str, permission: Permission, kind: ResourceKind) -> AccessDecision:
        """Decide whether a permission is allowed on all resources of a kind.

        It is not if a rule denies it on one of them.
        """
        found = list(self._of(kind, principal))
        every = [named for each in found if (named := each.by_name.get(EVERY)) is not None]
        return _decision(permission, every, [each.all for each in found])

    def _of(self, kind: ResourceKind, principal: str) -> Iterable[_OfPrincipal]:
        of_kind = self._kinds.get(kind.value)
        return () if of_kind is None else of_kind.matching(principal)


def _decision(permission: Permission, allowing: Iterable[_Named], denying: Iterable[_Named]) -> AccessDecision:
    """Return the decision, with the first rule that makes it."""
    denied = min((found for each in denying for found in each.find("deny", _COVERING[permission])), default=None)
    if denied is not None:
        return AccessDecision(False, denied[1])
    allowed = min((found for each in allowing for found in each.find("allow", _ALLOWING[permission])), default=None)
    return AccessDecision(False) if allowed is None else AccessDecision(True, allowed[1])


def sees_namespace(rules: Sequence[AccessRule], principal: str, namespace: str) -> bool:
    """Whether a principal has a permission on a resource that a namespace has, or may have.

    A rule that allows counts unless a rule denies the same on all that it names there.
    """
    mine = [rule for rule in rules if matches(rule.principal, principal) and rule.kind != ResourceKind.CLUSTER.value]
    denies = [rule for rule in mine if rule.effect == "deny"]
    for allow in mine:
        inside = _inside(allow.name, namespace + NAMESPACE_END) if allow.effect == "allow" else ""
        if inside and not any(deny.kind == allow.kind and _hides(deny, allow.permission, inside) for deny in denies):
            return True
    return False


def _inside(pattern: str, prefix: str) -> str:
    """Return the pattern of those names with a prefix that another pattern names, too; "" for none."""
    if pattern.endswith(EVERY) and prefix.startswith(pattern[:-1]):
        return prefix + EVERY
    return pattern if pattern.startswith(prefix) else ""


def _hides(deny: AccessRule, permission: str, inside: str) -> bool:
    """Whether a rule denies a permission on all names of a pattern."""
    wanted = Permission.DESCRIBE.value if permission in _IMPLY_DESCRIBE else permission
    named = deny.permission in (wanted, Permission.ALL.value)
    return named and (inside == deny.name or (deny.name.endswith(EVERY) and inside.startswith(deny.name[:-1])))


def grant_command(principal: str, permission: Permission, resource: Resource) -> str:
    """Return the command by which an operator allows a permission."""
    on = (
        "--cluster"
        if resource.kind is ResourceKind.CLUSTER
        else f"--{resource.kind.value} {shlex.quote(resource.name)}"
    )
    return f"memq acl allow {shlex.quote(principal)} {permission.value} {on}"


# ---- roles -----------------------------------------------------------------------------------------

Grants = Sequence[tuple[Permission, ResourceKind]]
_REPORTS = ((Permission.WRITE, ResourceKind.TOPIC), AUDIT_TOPIC)
_SEES_CLUSTER = (Permission.DESCRIBE, ResourceKind.CLUSTER)
ROLES: dict[str, Grants] = {
    "producer": (
        _SEES_CLUSTER,
        (Permission.WRITE, ResourceKind.TOPIC),
        (Permission.WRITE, ResourceKind.QUEUE),
        (Permission.WRITE, ResourceKind.TRANSACTIONAL_ID),
        (Permission.WRITE, ResourceKind.PRODUCER_GROUP),
    ),
    "consumer": (
        _SEES_CLUSTER,
        (Permission.READ, ResourceKind.TOPIC),
        (Permission.READ, ResourceKind.QUEUE),
        (Permission.READ, ResourceKind.GROUP),
    ),
    "read-only": (
        _SEES_CLUSTER,
        (Permission.READ, ResourceKind.TOPIC),
        (Permission.DESCRIBE, ResourceKind.QUEUE),
        (Permission.DESCRIBE, ResourceKind.GROUP),
    ),
    "metadata-only": tuple((Permission.DESCRIBE, kind) for kind in KINDS),
    "operator": (
        (Permission.OPERATE, ResourceKind.CLUSTER),
        *((Permission.DESCRIBE, kind) for kind in KINDS),
        *(
            (permission, kind)
            for kind in KINDS
            if kind is not ResourceKind.CLUSTER
            for permission in (Permission.CREATE, Permission.ALTER, Permission.DELETE)
        ),
    ),
    "owner": (_SEES_CLUSTER, *((Permission.ALL, kind) for kind in KINDS if kind is not ResourceKind.CLUSTER)),
    "admin": tuple((Permission.ALL, kind) for kind in KINDS),
}
_REPORTING = ("producer", "consumer", "read-only", "owner")


def kinds_of_role(role: str) -> list[ResourceKind]:
    """Return the kinds of resources, but the cluster, on which a role has permissions.

    Raises: InvalidRequestError for an unknown role.
    """
    grants = ROLES.get(role)
    if grants is None:
        raise InvalidRequestError(f"role {role[:60]!a} does not exist", hint=f"one of {', '.join(ROLES)}")
    return list(dict.fromkeys(kind for _, kind in grants if kind is not ResourceKind.CLUSTER))


def is_of_cluster(role: str) -> bool:
    """Whether a role changes or operates the whole cluster, whatever resources are named."""
    return any(kind is ResourceKind.CLUSTER and each is not Permission.DESCRIBE for each, kind in ROLES[role])


def rules_of_role(role: str, principal: str, names: Mapping[ResourceKind, Sequence[str]]) -> list[AccessRule]:
    """Return the rules that give a principal a role on the resources with these names.

    They include the role's permissions on the cluster and, for roles of clients, on the topic of the audit.
    Raises: InvalidRequestError for an unknown role, no names, or names of a kind that the role does not use.
    """
    kinds = kinds_of_role(role)
    for kind, given in names.items():
        if given and kind not in kinds:
            raise InvalidRequestError(f"role '{role}' has no permission on a {kind.value}", hint="leave that name out")
    if not any(names.values()):
        options = " or ".join(f"--{kind.value}" for kind in kinds)
        raise InvalidRequestError(f"role '{role}' needs a name of {options}", hint="'*' names all")
    found = [
        AccessRule(effect="allow", principal=principal, permission=permission.value, kind=kind.value, name=name)
        for permission, kind in ROLES[role]
        for name in ((EVERY,) if kind is ResourceKind.CLUSTER else names.get(kind, ()))
    ]
    if role in _REPORTING:
        (permission, kind), name = _REPORTS
        found.append(
            AccessRule(effect="allow", principal=principal, permission=permission.value, kind=kind.value, name=name)
        )
    return [check_rule(rule) for rule in found]

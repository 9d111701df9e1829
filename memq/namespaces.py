"""Namespaces: defaults and limits of their topics. Pure.

The coordinator keeps them with the rules of permissions (`memq.permissions.RuleSet`). A namespace needs no entry there:
the first topic `team/clicks` begins the namespace `team`, without defaults and limits.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from memq.errors import InvalidRequestError, NotFoundError
from memq.limits import PARTITIONS_MAX
from memq.topic import Topic, TopicSettings, check_name, namespace_of, parse_settings

TOPICS_MAX = 1 << 20  # the greatest limits that can be set
PARTITIONS_TOTAL_MAX = 1 << 24


class Namespace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Defaults of new topics, and limits of a namespace; 0 is the default of brokers, or no limit.

    `settings` are topic settings that a new topic gets unless its creation sets others. `partitions_max` is the number
    of write partitions of all its topics.
    """

    name: str
    partitions: int = 0
    settings: dict[str, int | bool | str] = {}
    topics_max: int = 0
    partitions_max: int = 0

    def __str__(self) -> str:
        numbers = {name: getattr(self, name) for name in ("partitions", "topics_max", "partitions_max")}
        parts = [f"{name} {number}" for name, number in numbers.items() if number]
        parts += [f"{name}={value}" for name, value in self.settings.items()]
        return f"namespace '{self.name}': {', '.join(parts) or 'no defaults and no limits'}"

    def base(self, base: TopicSettings) -> TopicSettings:
        """Return the settings of a new topic that sets none itself. Raises: as `parse_settings`."""
        return parse_settings(self.settings, base)


def check_namespace(namespace: Namespace) -> Namespace:
    """Return a namespace whose name, numbers and settings are valid.

    Raises: InvalidNameError, InvalidRequestError, InvalidSettingError, UnknownSettingError.
    """
    check_name(namespace.name, "namespace")
    bounds = {"partitions": PARTITIONS_MAX, "topics_max": TOPICS_MAX, "partitions_max": PARTITIONS_TOTAL_MAX}
    for name, most in bounds.items():
        if not 0 <= getattr(namespace, name) <= most:
            raise InvalidRequestError(
                f"{name} = {getattr(namespace, name)} of namespace '{namespace.name}' is outside 0 to {most}"
            )
    namespace.base(TopicSettings())
    return namespace


def namespace_named(namespaces: Iterable[Namespace], name: str) -> Namespace:
    """Return the namespace with this name; one without defaults and limits if it is not set."""
    return next((each for each in namespaces if each.name == name), Namespace(name=name))


def topics_of(topics: Iterable[Topic], namespace: str) -> list[Topic]:
    """Return the topics of a namespace."""
    return [topic for topic in topics if namespace_of(topic.name) == namespace]


def check_room(namespace: Namespace, topics: Iterable[Topic], name: str, partitions: int) -> None:
    """Check that a namespace has room for one more topic; `topics` are all of the cluster.

    A topic with the name has its room. Raises: InvalidRequestError.
    """
    others = topics_of(topics, namespace.name)
    if any(topic.name == name for topic in others):
        return
    used = sum(len(topic.partitions) for topic in others)
    if 0 < namespace.topics_max <= len(others):
        raise InvalidRequestError(
            f"namespace '{namespace.name}' has {len(others)} topics, {namespace.topics_max} are allowed",
            hint=f"delete one, or have topics_max raised with: memq namespace set {namespace.name} --topics-max N",
        )
    if 0 < namespace.partitions_max < used + partitions:
        raise InvalidRequestError(
            f"topic '{name}' with {partitions} partitions does not fit into namespace '{namespace.name}': "
            f"it has {used}, {namespace.partitions_max} are allowed",
            hint="give fewer partitions, or have partitions_max raised with: "
            f"memq namespace set {namespace.name} --partitions-max N",
        )


def absent_namespace(name: str) -> NotFoundError:
    """Return the error for a namespace that does not exist, or that the principal may not see."""
    return NotFoundError(f"namespace '{name[:60]}' does not exist", hint="memq namespace list shows the namespaces")

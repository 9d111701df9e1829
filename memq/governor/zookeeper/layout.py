"""Paths and contents of nodes in ZooKeeper: bytes to values and back. Pure.

====================================  ==========  ===========================================================
node, below the path of the URL       kind        holds
====================================  ==========  ===========================================================
`/cluster`                            persistent  the cluster's name
`/store`                              persistent  the mark of the cluster's store
`/rules`                              persistent  the rules of permissions, with their version
`/brokers/BROKER`                     ephemeral   a `BrokerEntry`
`/loads/BROKER`                       ephemeral   a list of `Load`
`/topics/TOPIC`                       persistent  a `Topic`, `/` of its name written as `:`; version of the node + 1
`/partitions/TOPIC ID`                persistent  the topic's name; kept after its deletion, since ids are used once
`/partitions/TOPIC ID/PARTITION`      persistent  an `Assignment`; its version is the node's version
`/governor`                           ephemeral   a `Government`: the governor and its term
`/term`                               persistent  nothing; its version is the number of the last term
`/takeovers`                          persistent  a list of `Takeover`: sessions that ended by an early takeover
====================================  ==========  ===========================================================
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from memq.errors import CorruptDataError, InvalidRequestError
from memq.governor import Assignment
from memq.governor.registry import Takeover
from memq.permissions import RuleSet
from memq.permissions import decode_rules as decode_rule_set
from memq.topic import NAMESPACE_END, Topic

CLUSTER = "/cluster"
STORE = "/store"
RULES = "/rules"
BROKERS = "/brokers"
LOADS = "/loads"
TOPICS = "/topics"
PARTITIONS = "/partitions"
GOVERNOR = "/governor"
TERM = "/term"
TAKEOVERS = "/takeovers"
_NAMESPACE_END_IN_PATH = ":"  # no name has it
INITIAL_NODES = (BROKERS, LOADS, TOPICS, PARTITIONS, TERM, TAKEOVERS)

Value = TypeVar("Value")


class Government(msgspec.Struct, frozen=True, kw_only=True):
    """The governing broker, its session, and the term."""

    id: str
    session: str
    term: int


class _Owned(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of an assignment's node; the rest is its path and its version."""

    broker: str = ""
    session: str = ""
    epoch: int = 0


def broker_path(broker: str) -> str:
    """Return the node of a live broker."""
    return f"{BROKERS}/{broker}"


def loads_path(broker: str) -> str:
    """Return the node of a broker's reported loads."""
    return f"{LOADS}/{broker}"


def topic_path(name: str) -> str:
    """Return the node of a topic."""
    return f"{TOPICS}/{name.replace(NAMESPACE_END, _NAMESPACE_END_IN_PATH)}"


def topic_of_node(node: str) -> str:
    """Return the name of the topic in a node below `TOPICS`."""
    return node.replace(_NAMESPACE_END_IN_PATH, NAMESPACE_END)


def id_path(topic_id: str) -> str:
    """Return the node of a topic id, above its partitions."""
    return f"{PARTITIONS}/{topic_id}"


def partition_path(topic_id: str, partition: int) -> str:
    """Return the node of an assignment."""
    return f"{PARTITIONS}/{topic_id}/{partition}"


def encode(value: object) -> bytes:
    """Return the bytes of a node."""
    return msgspec.json.encode(value)


def decode(path: str, data: bytes, kind: type[Value]) -> Value:
    """Return the value in a node. Raises: CorruptDataError naming the node."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptDataError(
            f"ZooKeeper node {path} holds no {getattr(kind, '__name__', kind)}: {error}",
            hint="something else writes below the path of the coordinator's URL; choose another one",
        ) from error


def decode_takeovers(data: bytes) -> tuple[Takeover, ...]:
    """Return the early takeovers; none while the node is empty."""
    return decode(TAKEOVERS, data, tuple[Takeover, ...]) if data else ()


def decode_rules(data: bytes) -> RuleSet:
    """Return the rules of permissions. Raises: CorruptDataError."""
    try:
        return decode_rule_set(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequestError) as error:
        raise CorruptDataError(
            f"ZooKeeper node {RULES} holds no rules that are sound: {error}",
            hint="something else writes below the path of the coordinator's URL; choose another one",
        ) from error


def decode_topic(path: str, data: bytes, version: int) -> Topic:
    """Return the topic in a node of this version."""
    return msgspec.structs.replace(decode(path, data, Topic), version=version + 1)


def encode_assignment(assignment: Assignment) -> bytes:
    """Return the bytes of an assignment's node."""
    return encode(_Owned(broker=assignment.broker, session=assignment.session, epoch=assignment.epoch))


def decode_assignment(path: str, data: bytes, version: int) -> Assignment:
    """Return the assignment in a node of this version."""
    owned = decode(path, data, _Owned)
    topic_id, number = path.split("/")[-2:]
    return Assignment(
        topic_id=topic_id,
        partition=int(number),
        broker=owned.broker,
        session=owned.session,
        epoch=owned.epoch,
        version=version,
    )

"""Least-privilege policies of a bucket, by role: the requests that memq makes for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from memq.errors import InvalidRequestError
from memq.format.key import (
    STORE_MARK,
    compaction_prefix,
    held_prefix,
    shared_prefix,
    staged_prefix,
    states_prefix,
    sweep_prefix,
    topics_prefix,
)
from memq.storage_handlers import CHECK_PREFIX
from memq.topic import check_name

CLUSTER, TOPIC = "{cluster}", "{topic}"  # in patterns of keys


class StoreCall(Enum):
    """The requests of a store, each with the actions of S3 that it needs. A size is a GET of the head."""

    GET = ("s3:GetObject",)
    PUT = ("s3:PutObject", "s3:AbortMultipartUpload")
    DELETE = ("s3:DeleteObject",)
    LIST = ("s3:ListBucket",)


class Grant(NamedTuple):
    """Requests that a role makes for keys below a prefix; a final `*` matches the rest of the key."""

    call: StoreCall
    keys: str


def _topic(rest: str = "*") -> str:
    return f"{topics_prefix(CLUSTER)}{TOPIC}/{rest}"


_ALL = f"{CLUSTER}/*"
_CHECKS = f"{CHECK_PREFIX}*"
_SHARED = f"{shared_prefix(CLUSTER)}*"  # with batches of all topics
_STAGED = f"{staged_prefix(CLUSTER)}*"
_STATES = f"{states_prefix(CLUSTER)}*"
_HELD = f"{held_prefix(CLUSTER)}*"
_COLD = compaction_prefix(CLUSTER, TOPIC, "*")
_DELETED = (_topic(), _SHARED, _STAGED, _STATES, _HELD, f"{sweep_prefix(CLUSTER)}*")

# A put reads its object when the store does not say whether it was stored, so each put has a get of the same keys.
GRANTS: dict[str, Sequence[Grant]] = {
    "broker": (
        *(Grant(call, keys) for call in StoreCall if call is not StoreCall.DELETE for keys in (_ALL, _CHECKS)),
        *(Grant(StoreCall.DELETE, keys) for keys in (*_DELETED, _CHECKS)),
    ),
    "producer": (Grant(StoreCall.GET, _STAGED), Grant(StoreCall.PUT, _STAGED)),  # of staged parts alone
    "consumer": tuple(Grant(StoreCall.GET, keys) for keys in (_topic(), _SHARED, _STAGED)),
    "auditor": (
        *(Grant(StoreCall.GET, keys) for keys in (_topic(), _SHARED, _STAGED, _STATES, _HELD)),
        *(Grant(StoreCall.LIST, keys) for keys in (_topic(), _SHARED, _HELD, _STATES)),
    ),
    "spark": (
        *(Grant(StoreCall.GET, keys) for keys in (_topic(), _SHARED, _STAGED)),
        *(Grant(StoreCall.LIST, keys) for keys in (_topic(), _STAGED)),
        *(Grant(StoreCall.PUT, keys) for keys in (_STAGED, f"{_COLD}*")),
    ),
    "operator": (
        *(Grant(StoreCall.GET, keys) for keys in (_ALL, _CHECKS)),
        *(Grant(StoreCall.LIST, keys) for keys in (_ALL, _CHECKS)),
        *(Grant(StoreCall.DELETE, keys) for keys in (*_DELETED, _CHECKS)),
        *(
            Grant(StoreCall.PUT, keys)
            for keys in (f"{sweep_prefix(CLUSTER)}*", _STATES, f"{CLUSTER}/{STORE_MARK}", _CHECKS)
        ),
    ),
}
ROLES = tuple(GRANTS)


def policy_of(
    role: str,
    bucket: str,
    prefix: str,
    cluster: str,
    *,
    topics: Sequence[str] = (),
    deletes: bool = True,
    kms: str = "",
) -> dict[str, Any]:
    """Return the policy of a role, as AWS takes it, for the keys below `prefix` of a bucket.

    `topics` bounds the topics; without them, all are meant. `deletes`: a broker or an operator deletes objects.
    `kms` is the ARN of the key that encrypts the bucket.
    Raises: InvalidRequestError for an unknown role; InvalidNameError for a topic or cluster that can't exist.
    """
    grants = GRANTS.get(role)
    if grants is None:
        raise InvalidRequestError(f"role {role[:60]!a} does not exist", hint=f"one of {', '.join(ROLES)}")
    for name in topics:
        check_name(name, "topic")
    names = {CLUSTER: [check_name(cluster, "cluster")], TOPIC: list(topics) or ["*"]}
    keys: dict[StoreCall, list[str]] = {}
    for call, pattern in grants:
        if deletes or call is not StoreCall.DELETE:
            keys.setdefault(call, []).extend(_filled(prefix + pattern, names))
    statements = [_statement(call, bucket, found) for call, found in keys.items()]
    if kms:
        actions = ["kms:Decrypt", *(["kms:GenerateDataKey"] if StoreCall.PUT in keys else [])]
        statements.append({"Sid": "Keys", "Effect": "Allow", "Action": actions, "Resource": kms})
    return {"Version": "2012-10-17", "Statement": statements}


def _filled(pattern: str, names: Mapping[str, Sequence[str]]) -> list[str]:
    (cluster,) = names[CLUSTER]
    filled = pattern.replace(CLUSTER, cluster)
    return list(dict.fromkeys(filled.replace(TOPIC, topic) for topic in names[TOPIC]))


def _statement(call: StoreCall, bucket: str, keys: Sequence[str]) -> dict[str, Any]:
    arn = f"arn:aws:s3:::{bucket}"
    statement = {"Sid": call.name.title(), "Effect": "Allow", "Action": list(call.value)}
    if call is StoreCall.LIST:  # a listing names a prefix, not an object
        return {**statement, "Resource": arn, "Condition": {"StringLike": {"s3:prefix": list(keys)}}}
    return {**statement, "Resource": [f"{arn}/{each}" for each in keys]}

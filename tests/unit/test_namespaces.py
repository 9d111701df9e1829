"""Names with a namespace: their grammar, and their forms in keys, Kafka and ZooKeeper, of which no two are equal."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import InvalidNameError, InvalidRequestError
from memq.format.key import (
    LargeObjectKey,
    ObjectKey,
    compaction_manifest_key,
    large_object_key,
    object_key,
    parse_object_key,
    topic_of_folder,
    topic_prefix,
    topic_prefix_of,
)
from memq.governor.zookeeper.layout import topic_of_node, topic_path
from memq.namespaces import Namespace, check_namespace, check_room, namespace_named
from memq.notification.kafka.settings import Names
from memq.observe.metrics import METRICS, lines_of
from memq.permissions import (
    AccessRule,
    Permission,
    Resource,
    ResourceKind,
    RuleIndex,
    RuleSet,
    changed_namespaces,
    decode_rules,
    encode_rules,
    sees_namespace,
)
from memq.queues.pop.groups import check_queue, topic_of
from memq.topic import (
    AUDIT_GROUP,
    ReadPartition,
    Topic,
    TopicSettings,
    check_group,
    check_name,
    check_resource_name,
    equal_slots,
    name_of_run,
    namespace_of,
)

ID = "0123456789abcdef" * 2
# Few characters, so that many names differ in one only; and parts that keys and Kafka topics have themselves.
parts = st.one_of(
    st.text("ab.-_4", min_size=1, max_size=4),
    st.sampled_from(["-", "cold", "01234567", ID, f"a.{ID}", "a-1", "topics"]),
).filter(lambda part: part not in (".", ".."))
names = st.one_of(parts, st.builds("{}/{}".format, parts, parts))
ids = st.sampled_from([ID, ID[::-1]])


@pytest.mark.parametrize("name", ["clicks", "billing/invoices", "a/b", f"{'n' * 100}/{'t' * 148}", "-/-"])
def test_a_name_may_have_one_namespace(name: str) -> None:
    assert check_resource_name(name) == name
    assert namespace_of(name) == (name.split("/", maxsplit=1)[0] if "/" in name else "")


@pytest.mark.parametrize(
    "name",
    [
        *("", "/", "/a", "a/", "a//b", "a/b/c", "./a", "../a", "a/.", "a/..", "a b/c", "a/b c", "a/\n", "é/a", "a\\b"),
        *("_memq/a", "_memq_x/a", "a/_memq_audit", f"{'n' * 100}/{'t' * 149}"),
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidNameError, match="topic"):
        check_resource_name(name)


def test_names_of_clusters_brokers_and_stores_have_no_namespace() -> None:
    with pytest.raises(InvalidNameError, match="cluster name 'a/b' is not allowed"):
        check_name("a/b", "cluster")
    with pytest.raises(TypeError, match="topic must be str, not bytes"):
        check_resource_name(b"a/b")  # type: ignore[arg-type]


def test_groups_and_queues_have_namespaces() -> None:
    assert check_group("billing/reports") == "billing/reports"
    assert check_queue("billing/jobs") == "billing/jobs"
    assert check_queue("billing/invoices@billing/reports") == "billing/invoices@billing/reports"
    assert topic_of("billing/invoices@billing/reports") == "billing/invoices"
    for group in (f"{AUDIT_GROUP}-a/b", f"a/{AUDIT_GROUP}", "a/b/c"):
        with pytest.raises(InvalidNameError):
            check_group(group)
    with pytest.raises(InvalidNameError):
        check_queue("billing/jobs@billing/a/b")


@given(names, ids)
def test_keys_read_back_and_are_below_their_prefix(name: str, id_: str) -> None:
    prefix = topic_prefix("c", name, id_)
    small = object_key("c", name, id_, 1, 2, 3, 1_700_000_000_000)
    large = large_object_key("c", name, id_, 7, 1_700_000_000_000)
    found, compacted = parse_object_key(small), parse_object_key(large)
    assert isinstance(found, ObjectKey)
    assert isinstance(compacted, LargeObjectKey)
    assert (found.topic, found.topic_id) == (compacted.topic, compacted.topic_id) == (name, id_[:8])
    for key in (small, large, compaction_manifest_key("c", name, id_, 1, 2)):
        assert topic_prefix_of(key) == prefix
        assert topic_of_folder(key) == ("c", name)


@given(names, ids, names, ids)
def test_no_prefix_of_a_topic_begins_that_of_another(one: str, one_id: str, other: str, other_id: str) -> None:
    first, second = topic_prefix("c", one, one_id), topic_prefix("c", other, other_id)
    assert second.startswith(first) == ((one, one_id) == (other, other_id))


def test_the_folder_of_a_namespace_is_of_no_topic() -> None:
    assert topic_of_folder("c/topics/billing/-/") is None
    assert topic_of_folder("c/topics/billing/-/invoices/") == ("c", "billing/invoices")
    assert topic_of_folder("c/topics/billing/") == ("c", "billing")


@given(names, ids, names, ids)
def test_kafka_topics_read_back_and_differ_also_in_the_metrics_of_kafka(
    one: str, one_id: str, other: str, other_id: str
) -> None:
    kafka = Names("memq.")
    log = ReadPartition(one, one_id, 3)
    name = kafka.kafka_topic(log)
    assert re.fullmatch(r"[a-zA-Z0-9._-]{1,249}", name)
    assert kafka.read_partition(name, 3) == log
    assert kafka.group(kafka.kafka_group(one)) == one
    collides = name.replace(".", "_") == kafka.kafka_topic(ReadPartition(other, other_id, 3)).replace(".", "_")
    if one_id != other_id:  # each topic has an id of its own
        assert not collides


@pytest.mark.parametrize("name", [f"memq.ab.{ID}-1", f"memq.a.{ID}-1", f"memq.a.b.{ID}-0", f"memq.a..{ID}-2"])
def test_kafka_topics_of_others_are_not_read_as_topics_of_memq(name: str) -> None:
    assert Names("memq.").read_partition(name, 0) is None


@given(names, names)
def test_nodes_of_zookeeper_and_names_of_runs_differ(one: str, other: str) -> None:
    assert topic_path(one).count("/") == 2
    assert topic_of_node(topic_path(one).rpartition("/")[2]) == one
    assert (topic_path(one) == topic_path(other)) == (one == other)
    assert (name_of_run("audit", one) == name_of_run("audit", other)) == (one == other)
    check_name(name_of_run("replay", one, other), "writer")


def test_names_of_runs_without_namespace_stay() -> None:
    assert name_of_run("replay", "a", "b") == "replay.a.b"
    assert name_of_run("replay", "team/a", "b") == "replay-4-0.team.a.b"


# ---- namespaces with defaults and limits -----------------------------------------------------------


def allow(name: str, permission: str = "read", kind: str = "topic", principal: str = "ann") -> AccessRule:
    return AccessRule(effect="allow", principal=principal, permission=permission, kind=kind, name=name)


def deny(name: str, permission: str = "all", kind: str = "topic") -> AccessRule:
    return AccessRule(effect="deny", principal="ann", permission=permission, kind=kind, name=name)


@pytest.mark.parametrize(
    ("rules", "seen"),
    [
        ([], False),
        ([allow("billing/*")], True),
        ([allow("billing/invoices")], True),
        ([allow("billing/inv*", "create")], True),
        ([allow("bil*")], True),
        ([allow("*")], True),
        ([allow("billing/x", kind="group")], True),
        ([allow("*", "describe", "cluster")], False),
        ([allow("billing")], False),
        ([allow("billing.*")], False),
        ([allow("billing2/*")], False),
        ([allow("*", principal="bob")], False),
        ([allow("*", principal="a*")], True),
        ([allow("*"), deny("billing/*")], False),
        ([allow("*"), deny("billing/*", "describe")], False),
        ([allow("*"), deny("billing/*", "read")], True),
        ([allow("*"), deny("billing/invoices")], True),
        ([allow("billing/invoices"), deny("billing/invoices")], False),
        ([allow("billing/*", "create"), deny("billing/*", "describe")], True),
        ([allow("billing/*", "create"), deny("b*", "create")], False),
        ([allow("*"), deny("billing/*", kind="group")], True),
    ],
)
def test_a_principal_sees_a_namespace_in_which_it_has_a_permission(rules: list[AccessRule], seen: bool) -> None:
    assert sees_namespace(rules, "ann", "billing") is seen


@given(
    st.lists(
        st.builds(
            AccessRule,
            effect=st.sampled_from(["allow", "allow", "deny"]),
            principal=st.just("ann"),
            permission=st.sampled_from([each.value for each in Permission]),
            kind=st.sampled_from(["topic", "group"]),
            name=st.sampled_from(["*", "a*", "a/*", "a/t*", "a/t", "a/u", "ab/*", "a"]),
        ),
        max_size=4,
    )
)
def test_a_namespace_of_a_resource_that_a_principal_may_use_is_seen(rules: list[AccessRule]) -> None:
    """Nothing is hidden that a request for the resource itself would show."""
    for kind in (ResourceKind.TOPIC, ResourceKind.GROUP):
        for name in ("a/t", "a/u", "a/other"):
            if RuleIndex(rules).decide("ann", Permission.DESCRIBE, Resource(kind, name)).allowed:
                assert sees_namespace(rules, "ann", "a")


def test_a_namespace_gives_its_topics_settings_and_has_limits() -> None:
    one = Namespace(name="billing", settings={"retention_ms": 86_400_000}, topics_max=2, partitions_max=10)
    assert check_namespace(one) is one
    assert one.base(TopicSettings()).retention_ms == 86_400_000
    assert str(one) == "namespace 'billing': topics_max 2, partitions_max 10, retention_ms=86400000"
    topics = [topic_named("billing/a", 4), topic_named("billing.b", 4), topic_named("other/a", 4)]
    check_room(one, topics, "billing/b", 6)
    with pytest.raises(
        InvalidRequestError, match="with 7 partitions does not fit into namespace 'billing': it has 4, 10"
    ):
        check_room(one, topics, "billing/b", 7)
    check_room(one, topics, "billing/a", 7)  # it exists
    topics.append(topic_named("billing/b", 1))
    with pytest.raises(InvalidRequestError, match="namespace 'billing' has 2 topics, 2 are allowed"):
        check_room(one, topics, "billing/c", 1)
    check_room(Namespace(name="billing"), topics, "billing/c", 4_000)


@pytest.mark.parametrize(
    "bad",
    [
        {"name": "a/b"},
        {"name": ""},
        {"name": "_memq"},
        {"name": "a", "partitions": -1},
        {"name": "a", "partitions": 4_097},
        {"name": "a", "topics_max": -1},
        {"name": "a", "settings": {"retention_ms": 1}},
        {"name": "a", "settings": {"retention": 1}},
    ],
)
def test_namespaces_that_are_not_sound_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        check_namespace(Namespace(**bad))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError):
        changed_namespaces(RuleSet(), [Namespace(**bad)], ())  # type: ignore[arg-type]
    with pytest.raises((InvalidRequestError, msgspec.MsgspecError)):
        decode_rules(encode_rules(RuleSet(version=1, namespaces=(Namespace(**bad),))))  # type: ignore[arg-type]


def test_changes_of_namespaces_are_versions_of_the_rules() -> None:
    one, other = Namespace(name="b", topics_max=1), Namespace(name="a")
    stored = changed_namespaces(RuleSet(), [one, other], ())
    assert (stored.version, stored.namespaces) == (1, (other, one))
    assert decode_rules(encode_rules(stored)) == stored
    assert changed_namespaces(stored, [one], ["absent"]) is stored
    assert changed_namespaces(stored, [Namespace(name="b")], ["a"]).namespaces == (Namespace(name="b"),)
    assert namespace_named(stored.namespaces, "b") is one
    assert namespace_named(stored.namespaces, "c") == Namespace(name="c")


def topic_named(name: str, partitions: int) -> Topic:
    return Topic(name=name, id=ID, created_ms=0, partitions=equal_slots(partitions))


def test_metrics_of_topics_have_the_namespace_as_a_label() -> None:
    family = lines_of("memq_group_lag_records", [(("billing/reports", "billing/invoices"), 3), (("g", "t"), 4)])
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"group": "billing/reports", "topic": "billing/invoices", "namespace": "billing"}, 3),
        ({"group": "g", "topic": "t", "namespace": ""}, 4),
    ]
    for metric in METRICS.values():
        assert ("namespace" in metric.labels) == ("topic" in metric.labels), metric.name

"""Answers leave out what a principal may not describe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.broker.api import Call
from memq.broker.permissions.shown import (
    shown_delayed,
    shown_group,
    shown_groups,
    shown_metadata,
    shown_plan,
    shown_pops,
    shown_queues,
    shown_transactions,
)
from memq.permissions import Permission, Resource, ResourceKind
from memq.protocol.admin_messages import AdminAnswer
from memq.protocol.group_messages import WireCommitted, WireGroup, WireMember
from memq.protocol.hold_messages import WireDelayedTopic
from memq.protocol.messages import Metadata, MetadataRequest, PartitionRef, TopicMetadata
from memq.protocol.pop_messages import WirePop
from memq.protocol.queue_messages import QueueAnswer, WireQueue
from memq.protocol.transaction_messages import WireOpenTransaction
from memq.protocol.wire_types import WireChange
from tests.unit.bare_cluster import topic_of


class Access:
    """Describes one topic, transactional id, queue and group; with `all_topics` also all others."""

    def __init__(self, all_topics: bool) -> None:
        self._all = all_topics

    def may(self, permission: Permission, resource: Resource) -> bool:
        return permission is Permission.DESCRIBE and (self._all or resource.name in ("clicks", "seen"))

    def may_on_all(self, permission: Permission, kind: ResourceKind) -> bool:
        return self._all and (permission, kind) == (Permission.DESCRIBE, ResourceKind.TOPIC)


def call(all_topics: bool) -> Call[Any]:
    return cast(Call[Any], SimpleNamespace(access=Access(all_topics)))


def ref(topic: str) -> PartitionRef:
    return PartitionRef(topic=topic, topic_id="0" * 32, partition=0)


@pytest.mark.parametrize(("all_topics", "names"), [(False, ["clicks"]), (True, ["clicks", "secret"])])
def test_a_group_has_positions_and_members_of_topics_that_are_seen(all_topics: bool, names: list[str]) -> None:
    refs = [ref("clicks"), ref("secret")]
    positions = [WireCommitted(partition=each, pointer_offset=1, record_index=0) for each in refs]
    group = WireGroup(group="g", members=[WireMember(member="m", assigned=refs)], positions=positions)
    shown_group(call(all_topics), AdminAnswer(group=group))
    assert [each.partition.topic for each in group.positions] == names
    assert [each.topic for each in group.members[0].assigned] == names


@pytest.mark.parametrize("all_topics", [False, True])
def test_a_plan_has_notes_for_those_alone_that_see_all_topics(all_topics: bool) -> None:
    changes = [WireChange(topic=name, partition=0, before="a", after="b", reason="") for name in ("clicks", "secret")]
    answer = AdminAnswer(changes=changes, notes=["topic 'secret' is too large"])
    shown_plan(call(all_topics), answer)
    assert [each.topic for each in answer.changes] == (["clicks", "secret"] if all_topics else ["clicks"])
    assert bool(answer.notes) == all_topics


@pytest.mark.parametrize("all_topics", [False, True])
def test_a_transaction_is_shown_by_its_id_and_without_hidden_topics(all_topics: bool) -> None:
    def open_as(name: str) -> WireOpenTransaction:
        blocks = {"clicks": 1, "secret": 2}
        return WireOpenTransaction(name=name, group="g", instance=1, number=1, open_ms=1, timeout_ms=1, blocks=blocks)

    answer = AdminAnswer(transactions=[open_as("hidden"), open_as("seen")])
    shown_transactions(call(all_topics), answer)
    blocks = {"clicks": 1, "secret": 2} if all_topics else {"clicks": 1}
    assert [(each.name, each.blocks) for each in answer.transactions] == [
        *([("hidden", blocks)] if all_topics else []),
        ("seen", blocks),
    ]


@pytest.mark.parametrize(("all_topics", "names"), [(False, ["seen"]), (True, ["hidden", "seen"])])
def test_groups_delayed_topics_queues_and_pop_groups_are_shown_by_name(all_topics: bool, names: list[str]) -> None:
    both = ("hidden", "seen")
    queues = [WireQueue(queue=each, ready=1, leased=0, delayed=0, dead=0, oldest_ms=1) for each in both]
    pops = [WirePop(queue=each, topic_id="", lease_ms=1, attempts_max=0, items=1, positions=[]) for each in both]
    delayed = [WireDelayedTopic(topic=each, topic_id="", blocks=1, next_ms=1) for each in both]
    answer = AdminAnswer(groups=list(both), delayed=delayed, queue=QueueAnswer(queues=queues, pops=pops))
    of_caller = call(all_topics)
    shown_groups(of_caller, answer)
    shown_delayed(of_caller, answer)
    assert answer.groups == [each.topic for each in answer.delayed] == names
    of_pops = AdminAnswer(queue=QueueAnswer(pops=pops))
    shown_queues(of_caller, answer)
    shown_pops(of_caller, of_pops)
    assert [each.queue for each in answer.about_queues.queues] == names
    assert [each.queue for each in of_pops.about_queues.pops] == names


@pytest.mark.parametrize("named", [True, False])
def test_a_hidden_topic_is_missing_if_the_request_named_it_and_left_out_else(named: bool) -> None:
    both = [TopicMetadata(topic=topic_of(name)) for name in ("clicks", "secret")]
    found = Metadata(cluster="memq", topics=both, missing=["absent"], unconfirmed=["clicks", "secret"])
    ask, hidden = MetadataRequest(topics=["clicks", "secret"] if named else None), list[str]()
    access = SimpleNamespace(
        may=Access(False).may, hidden=lambda resources, peer: hidden.extend(each.name for each in resources)
    )
    of_caller = cast(Call[Any], SimpleNamespace(ask=ask, connection=SimpleNamespace(peer="h:1"), access=access))
    shown = cast(Metadata, shown_metadata(of_caller, found))
    assert [each.topic.name for each in shown.topics] == shown.unconfirmed == ["clicks"]
    assert shown.missing == (["absent", "secret"] if named else [])
    assert hidden == (["secret"] if named else [])
    assert shown_metadata(cast(Call[Any], SimpleNamespace(ask=ask, access=Access(True))), found) is found

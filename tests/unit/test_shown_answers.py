"""Answers leave out what a principal may not describe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.broker.api import Call
from memq.broker.permissions.shown import shown_group, shown_plan
from memq.permissions import Permission, Resource, ResourceKind, topic_resource
from memq.protocol.admin_messages import AdminAnswer
from memq.protocol.group_messages import WireCommitted, WireGroup, WireMember
from memq.protocol.messages import PartitionRef
from memq.protocol.wire_types import WireChange

SEEN = topic_resource("clicks")


class Access:
    """Describes one topic; with `all_topics` also each other one."""

    def __init__(self, all_topics: bool) -> None:
        self._all = all_topics

    def may(self, permission: Permission, resource: Resource) -> bool:
        return permission is Permission.DESCRIBE and (self._all or resource == SEEN)

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

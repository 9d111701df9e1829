"""The contract of the coordinator's rules of permissions, over every coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path

from memq.governor import Coordinator
from memq.governor.standalone import StandaloneCoordinator
from memq.permissions import AccessRule, RuleSet
from memq.runtime.clock import SystemClock
from tests.contract.coordinators import over_coordinators, topic


def rules(version: int, *principals: str) -> RuleSet:
    made = [
        AccessRule(effect="allow", principal=principal, permission="read", kind="topic", name="*")
        for principal in principals
    ]
    return RuleSet(version=version, rules=tuple(made))


@over_coordinators
async def test_rules_are_replaced_by_the_next_version_alone(coordinator: Coordinator) -> None:
    assert await coordinator.rules.read() == RuleSet()
    assert await coordinator.rules.replace(rules(2, "a")) == RuleSet()
    assert await coordinator.rules.replace(rules(1, "a", "b")) == rules(1, "a", "b")
    assert await coordinator.rules.replace(rules(1, "c")) == rules(1, "a", "b")
    assert await coordinator.rules.replace(rules(2)) == rules(2)
    await coordinator.create_topic(topic())
    assert await coordinator.rules.read() == rules(2)


@over_coordinators
async def test_of_changes_at_the_same_time_one_is_stored(coordinator: Coordinator) -> None:
    wanted = [rules(1, name) for name in "abcd"]
    answers = await asyncio.gather(*(coordinator.rules.replace(each) for each in wanted))
    stored = await coordinator.rules.read()
    assert stored in wanted
    assert set(answers) == {stored}


def test_rules_outlive_the_process(tmp_path: Path) -> None:
    async def run() -> None:
        for known in (RuleSet(), rules(1, "a")):
            coordinator = StandaloneCoordinator(tmp_path / "topics.sqlite", "test", SystemClock())
            assert await coordinator.rules.read() == known
            assert await coordinator.rules.replace(rules(1, "a")) == rules(1, "a")
            await coordinator.close()

    asyncio.run(run())

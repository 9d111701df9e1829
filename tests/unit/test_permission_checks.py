"""The rules of a broker in memory: reads that fail, lie and hang; what the log says of a refusal."""

from __future__ import annotations

import asyncio
import logging
import tracemalloc

import pytest

from memq.broker.permissions.checks import PermissionChecks
from memq.errors import DeniedError, NotReadyError, UnreachableError
from memq.permissions import AccessRule, Permission, Resource, ResourceKind, RuleSet, topic_resource
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.settings import BrokerSettings

CLICKS = topic_resource("clicks")


class ScriptedKeeper:
    """See `memq.governor.RuleKeeper`; gives scripted answers, the last one again and again."""

    def __init__(self, *answers: RuleSet | Exception) -> None:
        self.answers = list(answers)

    async def read(self) -> RuleSet:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def replace(self, changed: RuleSet) -> RuleSet:
        raise AssertionError("not called")


def rules(version: int, *names: str, effect: str = "allow") -> RuleSet:
    made = [
        AccessRule(effect=effect, principal="ann", permission="read", kind="topic", name=name)  # type: ignore[arg-type]
        for name in names
    ]
    return RuleSet(version=version, rules=tuple(made))


def checks_on(*answers: RuleSet | Exception) -> PermissionChecks:
    return PermissionChecks(BrokerSettings(permissions=True), ScriptedKeeper(*answers), EventLog(SystemClock()))


def may(checks: PermissionChecks) -> bool:
    return checks.may("ann", Permission.READ, CLICKS)


def test_an_unread_coordinator_opens_no_door_and_the_last_rules_stay() -> None:
    async def work() -> None:
        checks = checks_on(UnreachableError("down"), rules(3, "clicks"), UnreachableError("down"))
        with pytest.raises(UnreachableError):
            await checks.refresh()
        with pytest.raises(NotReadyError):
            may(checks)
        await checks.refresh()
        assert may(checks)
        with pytest.raises(UnreachableError):
            await checks.refresh()
        assert may(checks)

    asyncio.run(work())


@pytest.mark.parametrize("stale", [RuleSet(), rules(2, "clicks"), rules(3, "clicks")])
def test_one_older_or_other_answer_of_the_same_version_changes_nothing(stale: RuleSet) -> None:
    async def work() -> None:
        now = rules(3, "clicks", effect="deny")
        checks = checks_on(now, stale, now, stale)
        await checks.refresh()
        await checks.refresh()
        assert not may(checks)
        version = checks.version
        await checks.refresh()
        assert checks.version == version + 1, "the coordinator says it twice: it was restored"
        assert may(checks) == bool(stale.rules)

    asyncio.run(work())


def test_a_change_drops_the_decisions_in_memory() -> None:
    async def work() -> None:
        checks, changes = checks_on(rules(1, "clicks"), rules(2), rules(3, "clicks")), 0

        def changed() -> None:
            nonlocal changes
            changes += 1

        checks.changed = changed
        for wanted in (True, False, True, True):
            await checks.refresh()
            assert may(checks) == wanted
        assert changes == 3

    asyncio.run(work())


def test_a_refusal_names_principal_permission_resource_and_the_command(caplog: pytest.LogCaptureFixture) -> None:
    checks = checks_on(RuleSet())
    checks.apply(rules(1))
    with caplog.at_level(logging.WARNING, "memq"), pytest.raises(DeniedError) as raised:
        checks.check("ann", [(Permission.WRITE, CLICKS)], "open", "10.0.0.1:7")
    assert "principal 'ann' may not write topic 'clicks'" in str(raised.value)
    assert raised.value.hint.endswith("memq acl allow ann write --topic clicks")
    assert "permission-denied" in caplog.text
    assert "10.0.0.1:7" in caplog.text
    assert checks.denied_requests == {"open": 1}


def test_an_object_of_unknown_topics_needs_the_permission_on_all_topics() -> None:
    unknown = Resource(ResourceKind.OBJECT, "main/memq/states/1")
    for stored, allowed in ((rules(1, "clicks"), False), (rules(1, "*"), True), (rules(1), False)):
        checks = checks_on(stored)
        asyncio.run(checks.refresh())
        assert checks.may("ann", Permission.READ, unknown) is allowed
        assert not checks.may("bob", Permission.READ, unknown)


def test_everything_is_allowed_while_permissions_are_off() -> None:
    checks = PermissionChecks(BrokerSettings(), ScriptedKeeper(RuleSet()), EventLog(SystemClock()))
    assert may(checks)
    assert checks.may_on_all("ann", Permission.READ, ResourceKind.TOPIC)
    checks.check("ann", [(Permission.WRITE, CLICKS)], "open", "10.0.0.1:7")


def test_long_names_take_neither_memory_nor_room_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        checks = checks_on(rules(1, "clicks"))
        await checks.refresh()
        tracemalloc.start()
        try:
            for number in range(20):
                needs = [(Permission.READ, topic_resource(f"{number}-{'n' * 500_000}"))]
                with pytest.raises(DeniedError) as caught:
                    checks.check("ann", needs, "read", "10.0.0.1:5")
                assert len(str(caught.value)) < 1_000
                assert len(caught.value.hint) < 1_000
                del caught, needs
            assert tracemalloc.get_traced_memory()[0] < 4_000_000, "10 MB of names are kept"
        finally:
            tracemalloc.stop()

    asyncio.run(work())
    assert max(len(record.getMessage()) for record in caplog.records) < 1_000


def test_a_loud_principal_hides_no_refusal_of_another_one(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        checks = checks_on(RuleSet())
        await checks.refresh()
        for principal, peer, count in (
            ("anonymous", "10.0.0.9:1", 100),
            ("ann", "10.0.0.1:1", 1),
            ("anonymous", "b:1", 1),
        ):
            for _ in range(count):
                with pytest.raises(DeniedError):
                    checks.check(principal, [(Permission.READ, CLICKS)], "poll-entries", peer)
                checks.hidden(principal, [CLICKS], peer)

    caplog.set_level(logging.WARNING)
    asyncio.run(work())
    for event in ("permission-denied", "permission-hidden"):
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith(event)]
        assert len([line for line in lines if "10.0.0.9" in line]) == 10
        assert len([line for line in lines if "principal 'ann'" in line]) == 1
        assert len([line for line in lines if "from b:1" in line]) == 1

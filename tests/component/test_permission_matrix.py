"""Every operation of the table against rules: refused without one, and its handler is not called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.broker.api import Call, requests
from memq.broker.api.operations import Operation, Operations, operations_of
from memq.broker.broker import Broker
from memq.broker.services import BROKER_PROGRAM
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.permissions import AccessRule, Permission, ResourceKind, RuleSet, permission_subject
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.connection import Principal
from memq.protocol.frames import PREFIX, Api, Frame, encode_forward
from memq.protocol.group_messages import ListGroups
from memq.protocol.messages import Nack, PollRequest, decode_message, encode_message
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from tests.access import EVERYTHING
from tests.unit.test_operations import EXAMPLES, table

ROWS = table().rows
HANG_S = 20
OBJECT_TOPICS = ("clicks",)


class RecordingConnection:
    """The part of a connection that requests use; it keeps the answers."""

    def __init__(self, principal: str) -> None:
        self.principal = Principal(principal)
        self.peer = "10.0.0.1:5"
        self.program = self.client = "test"
        self.login = None
        target = SimpleNamespace(topic=SimpleNamespace(name="clicks"), partition=3)
        self.streams = {5: SimpleNamespace(open=True, target=target)}
        self.limiters = ()
        self.checksums = self.frame_checksums = self.closed = False
        self.outbox = self
        self.answered = asyncio.Event()
        self.errors: list[Nack] = []
        self.redirected: list[bool] = []
        self.sent = 0

    async def writable(self) -> None:
        """The socket is never full."""

    def send_redirect(self, stream: Any, address: str) -> None:
        self.redirected.append(stream.open)

    def send(self, prefix: bytes, body: bytes = b"") -> None:
        self.sent += 1
        if prefix[4] == Api.ERROR:
            self.errors.append(decode_message((prefix + body)[PREFIX.size :], Nack))
        self.answered.set()

    def abort(self) -> None:
        raise AssertionError("a request failed with an unexpected error")


class World:
    """A broker whose operations note their calls instead of doing something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, keep: Any = None, **settings: Any) -> None:
        self.called: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self._keep = keep

        def recording(*parts: Any) -> Operations:
            return Operations([self._recorder(row) for row in operations_of(*parts).rows])

        monkeypatch.setattr(requests, "operations_of", recording)
        queue, store = MemoryQueue(SystemClock()), MemoryHandler(SystemClock())
        self.broker = Broker(
            BrokerSettings(permissions=True, **settings),
            Runtime(),
            {"main": store},
            queue,
            MemoryCoordinator(MemoryCluster()),
        )
        self.permissions = self.broker.services.permissions

    def _recorder(self, row: Operation[Any]) -> Operation[Any]:
        async def handler(call: Call[Any]) -> AdminAnswer:
            self.called.append(row.name)
            self.meanwhile()
            return AdminAnswer()

        def keep(call: Call[Any], reply: Any) -> bool:
            self.called.append(row.name)
            reply(AdminAnswer())
            return True

        shown = None if row.shown is None else lambda call, answer: answer
        return replace(
            row,
            handler=handler,
            prepare=None,
            keep=None if row.keep is None else self._keep or keep,
            shown=cast(Any, shown),
        )

    async def ask(self, row: Operation[Any], principal: str) -> list[Nack]:
        """Send the example of an operation; return the errors in its answer."""
        ask, connection = EXAMPLES[row.message][0], RecordingConnection(principal)
        if row.api == Api.FORWARD:
            slab = self.broker.services.pool.lease(1_000)
            assert slab is not None
            body = encode_forward(7, ask, 0)[PREFIX.size :]
            slab.view[: len(body)] = body
            self.broker.requests.forward(cast(Any, connection), 7, slab, 0, len(body))
        else:
            envelope = {Api.ADMIN: AdminRequest, Api.POLL: PollRequest}.get(row.api)
            message = ask if envelope is None else envelope(ask=ask)
            self.broker.requests.request(cast(Any, connection), Frame(row.api, 0, 5, 7, encode_message(message)))
        async with asyncio.timeout(HANG_S):
            await connection.answered.wait()
        return connection.errors

    async def outcome(self, row: Operation[Any], principal: str, rules: Sequence[AccessRule]) -> tuple[bool, list[str]]:
        """Return whether the handler was called under these rules, and the codes of errors."""
        version = self.permissions.version + 1
        self.permissions.apply(RuleSet(version=version, rules=tuple(rules)))
        self.called.clear()
        errors = await self.ask(row, principal)
        return self.called == [row.name], [error.code for error in errors]


def needs_of(row: Operation[Any]) -> list[tuple[Permission, ResourceKind, str]]:
    """Return the permissions that rules must give for the example of an operation."""
    stream = SimpleNamespace(target=SimpleNamespace(topic=SimpleNamespace(name="clicks"), partition=3))
    call = Call(
        cast(Any, SimpleNamespace(streams={5: stream})),
        Principal("ann"),
        5,
        EXAMPLES[row.message][0],
        access=EVERYTHING,
    )
    found: dict[tuple[Permission, ResourceKind, str], None] = {}
    for permission, resource in row.needs(call):
        kind, name = permission_subject(resource)
        if kind is ResourceKind.OBJECT:
            kind, name = ResourceKind.TOPIC, "*"
        found[permission, kind, name or "*"] = None
    return list(found)


def allowing(needs: Sequence[tuple[Permission, ResourceKind, str]], effect: Any = "allow") -> list[AccessRule]:
    return [
        AccessRule(effect=effect, principal="ann", permission=permission.value, kind=kind.value, name=name)
        for permission, kind, name in needs
    ]


CALLED: tuple[bool, list[str]] = (True, [])
DENIED = (False, ["denied"])


@pytest.mark.parametrize("row", [row for row in ROWS if not row.listing], ids=lambda row: row.name)
def test_an_operation_needs_each_of_its_permissions(row: Operation[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        world, needs = World(monkeypatch), needs_of(row)
        assert needs, "each operation that is no listing needs a permission"
        assert await world.outcome(row, "ann", []) == DENIED
        assert await world.outcome(row, "ann", allowing(needs)) == CALLED
        assert await world.outcome(row, "bob", allowing(needs)) == DENIED
        for missing in needs:
            assert await world.outcome(row, "ann", allowing([each for each in needs if each != missing])) == DENIED
            denied = allowing(needs) + allowing([missing], "deny")
            assert await world.outcome(row, "ann", denied) == DENIED
        assert world.permissions.denied_requests == {row.name: 2 + 2 * len(needs)}

    asyncio.run(work())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_superusers_may_do_everything_but_what_brokers_ask_of_each_other(
    row: Operation[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        world = World(monkeypatch, superusers="root, ops-*", broker_principals="broker-*")
        everything = [
            AccessRule(effect="deny", principal="*", permission="all", kind=kind, name="*")
            for kind in ("cluster", "topic", "group", "queue", "transactional-id", "producer-group")
        ]
        for principal in ("root", "ops-1"):
            wanted = DENIED if row.permission is Permission.PEER else CALLED
            assert await world.outcome(row, principal, everything) == wanted
        assert await world.outcome(row, "broker-1", everything) == CALLED

    asyncio.run(work())


@pytest.mark.parametrize("row", [row for row in ROWS if not row.listing], ids=lambda row: row.name)
def test_before_the_rules_are_read_nothing_is_allowed(row: Operation[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        world = World(monkeypatch, broker_principals="broker-*")
        assert [error.code for error in await world.ask(row, "ann")] == ["not-ready"]
        assert not world.called
        assert await world.ask(row, "broker-1") == []

    asyncio.run(work())


def test_a_row_without_a_permission_or_a_listing_that_shows_all_can_not_be_made() -> None:
    with pytest.raises(TypeError):
        Operation("new", Api.ADMIN, AdminRequest, lambda call: [], handler=cast(Any, None))  # type: ignore[call-arg, arg-type]
    with pytest.raises(ValueError, match="leaves nothing out"):
        replace(ROWS[0], listing=True)


def test_a_kept_request_ends_when_its_permission_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[Any] = []

    def keep(call: Call[Any], reply: Any) -> bool:
        replies.append(reply)
        return True

    async def work() -> None:
        row = next(row for row in ROWS if row.keep is not None)
        world = World(monkeypatch, keep=keep)
        world.permissions.apply(RuleSet(version=1, rules=tuple(allowing(needs_of(row)))))
        kept, other = RecordingConnection("ann"), RecordingConnection("root")
        frame = Frame(row.api, 0, 0, 7, encode_message(EXAMPLES[row.message][0]))
        for connection in (kept, other):
            world.broker.requests.request(cast(Any, connection), frame)
        world.broker.requests.recheck(cast(Any, kept))
        assert len(replies) == 1
        assert not kept.errors
        assert [error.code for error in other.errors] == ["denied"]
        world.permissions.apply(RuleSet(version=2))
        kept.streams.clear()
        world.broker.requests.recheck(cast(Any, kept))
        assert [error.code for error in kept.errors] == ["denied"]
        replies[0](AdminAnswer())
        world.broker.requests.recheck(cast(Any, kept))
        assert kept.sent == 1, "each request has one answer"

    asyncio.run(work())


def test_a_stream_is_refused_when_its_permission_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        world = World(monkeypatch)
        connection = RecordingConnection("ann")
        opening = next(row for row in ROWS if row.name == "open")
        world.permissions.apply(RuleSet(version=1, rules=tuple(allowing(needs_of(opening)))))
        world.broker.requests.recheck(cast(Any, connection))
        assert connection.redirected == []
        world.permissions.apply(RuleSet(version=2))
        world.broker.requests.recheck(cast(Any, connection))
        world.broker.requests.recheck(cast(Any, connection))
        assert connection.redirected == [False], "once, and it takes no more blocks"

    asyncio.run(work())


def test_an_answer_with_records_is_checked_again_after_a_change_of_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        rows = [row for row in ROWS if row.recheck]
        assert {row.name for row in rows} >= {"read", "poll-entries", "dequeue-items"}
        for row in rows:
            world = World(monkeypatch)
            world.meanwhile = lambda world=world: world.permissions.apply(RuleSet(version=9))  # type: ignore[misc]
            assert await world.outcome(row, "ann", allowing(needs_of(row))) == (True, ["denied"])

    asyncio.run(work())


def test_a_stream_that_is_opened_while_the_rules_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        opening = next(row for row in ROWS if row.name == "open")
        world = World(monkeypatch)
        world.meanwhile = lambda: world.permissions.apply(RuleSet(version=9))
        world.permissions.apply(RuleSet(version=1, rules=tuple(allowing(needs_of(opening)))))
        connection = RecordingConnection("ann")  # its stream is the one that the handler opens
        frame = Frame(opening.api, 0, 5, 7, encode_message(EXAMPLES[opening.message][0]))
        world.broker.requests.request(cast(Any, connection), frame)
        async with asyncio.timeout(HANG_S):
            await connection.answered.wait()
        assert connection.redirected == [False]

    asyncio.run(work())


@pytest.mark.parametrize(("principal", "throttled"), [("eve", 2), ("broker-1", 0)])
def test_a_client_that_calls_itself_a_broker_has_no_room_of_one(
    monkeypatch: pytest.MonkeyPatch, principal: str, throttled: int
) -> None:
    monkeypatch.setattr(requests, "REQUESTS_PER_CONNECTION_MAX", 2)

    async def work() -> None:
        world, connection = World(monkeypatch, broker_principals="broker-*"), RecordingConnection(principal)
        connection.program = BROKER_PROGRAM
        for number in range(4):
            body = encode_message(AdminRequest(ask=ListGroups()))
            world.broker.requests.request(cast(Any, connection), Frame(Api.ADMIN, 0, 0, number, body))
        assert [each.code for each in connection.errors] == ["throttled"] * throttled
        await world.broker.requests.stop()

    asyncio.run(work())

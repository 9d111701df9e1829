"""Answers control frames: each request is a task, and each connection has a bounded number.

A heartbeat that waits for a change of its group is none: see `Operation.keep`. Each member has one at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from memq.broker.api import NO_BLOCKS, Answer, Call, WithBlocks
from memq.broker.api.cluster_requests import ClusterRequests
from memq.broker.api.group_migration import GroupMigrator
from memq.broker.api.group_requests import GroupRequests
from memq.broker.api.hold_requests import HoldRequests
from memq.broker.api.operations import Operation, operations_of
from memq.broker.api.pop_requests import PopRequests
from memq.broker.api.queue_requests import QueueRequests
from memq.broker.api.reader_requests import ReaderRequests
from memq.broker.api.stream_requests import StreamRequests
from memq.broker.api.topic_requests import TopicRequests
from memq.broker.api.transaction_requests import TransactionRequests
from memq.broker.ingest.connection import Connection
from memq.broker.ingest.quotas import Flow, Limiters, refusal_of
from memq.broker.ingest.slabs import Slab
from memq.broker.partitions import Partitions
from memq.broker.permissions.namespace_requests import NamespaceRequests
from memq.broker.permissions.permission_requests import PermissionRequests
from memq.broker.permissions.quota_requests import QuotaRequests
from memq.broker.permissions.resources import namespace_of_resource
from memq.broker.service_partitions.hosts import ServiceHosts
from memq.broker.services import BROKER_PROGRAM, Services
from memq.broker.spool.held_records import HeldRecords
from memq.broker.upkeep.own_groups import PROGRAM as UPKEEP_PROGRAM
from memq.errors import DamagedMessageError, DeniedError, MemqError, NotReadyError, ThrottledError, TooLargeError
from memq.format.sealed_json import is_sealed
from memq.limits import VERSION
from memq.permissions import Resource, ResourceKind
from memq.protocol.connection import ANONYMOUS, Principal
from memq.protocol.frames import (
    HELLO_MAGIC,
    Api,
    Frame,
    as_damage,
    check_version,
    decode_forward,
    encode_frame,
    encode_prefix,
    encode_with_blocks,
)
from memq.protocol.messages import Authenticate, Hello, HelloAnswer, Open, decode_message, encode_message, nack_of
from memq.runtime.process import keep_freed_blocks
from memq.runtime.tasks import ByteBudget, TaskOwner
from memq.topic import check_name

REQUESTS_PER_CONNECTION_MAX = 64
REQUESTS_PER_BROKER_MAX = 4_096  # that another broker forwards by one connection: those of many members
REQUEST_BYTES_MAX = 1 << 20
PENDING_BYTES_MAX = 32 << 20  # bodies of requests that wait for their answers, of all connections
KEPT_BYTES = 8 << 20  # more for requests that keep streams and groups alive: 32 held blocks may fill the others' room
ANSWERS_SHARE = 8  # an eighth of the memory budget, on top of it, is lent to answers: half to READ, half to POLL
# Requests that a client's limit delays or refuses, in addition to blocks. Requests that keep streams and groups alive
# are exempt, and a connection has as much room again for them: a POLL that its client gave up stays for seconds, and a
# consumer that often seeks, or reads a log that hangs, would lose its group.
LIMITED = frozenset({Api.METADATA, Api.READ, Api.POLL, Api.ADMIN})
BROKER_PROGRAMS = frozenset({BROKER_PROGRAM, UPKEEP_PROGRAM})
HELD_MS_MAX = 3_000  # longest delay by a limit, below the clients' time-out; the next request waits for the rest


@dataclass(slots=True, eq=False)
class _Kept:
    """A request whose answer may come much later; `frame` has no body."""

    operation: Operation[Any]
    call: Call[Any]
    frame: Frame
    answered: bool = False


class Requests:
    """Answers for all connections of one broker."""

    def __init__(
        self,
        services: Services,
        partitions: Partitions,
        hand_over: Callable[[], Awaitable[None]],
        held: HeldRecords,
        hosts: ServiceHosts,
        migrator: GroupMigrator,
    ) -> None:
        self._services = services
        self._operations = operations_of(
            StreamRequests(services, partitions),
            TopicRequests(services, partitions),
            ReaderRequests(services, partitions),
            GroupRequests(partitions, hosts, migrator),
            ClusterRequests(services, partitions, hand_over, held),
            HoldRequests(services, partitions, hosts),
            TransactionRequests(services, partitions, hosts),
            QueueRequests(services, hosts),
            PopRequests(services, hosts, partitions),
            PermissionRequests(services),
            QuotaRequests(services),
            NamespaceRequests(services),
        )
        self._tasks = TaskOwner(self._failed, services.events)
        half = services.settings.memory_bytes_max // ANSWERS_SHARE // 2
        self._lent = {Api.READ: ByteBudget(half), Api.POLL: ByteBudget(half)}  # a hanging store delays no POLL
        keep_freed_blocks(services.settings.memory_bytes_max // ANSWERS_SHARE)
        self._pending_bytes = 0
        self._working: dict[Connection, dict[asyncio.Task[None], _Kept | None]] = {}  # see `Operation.recheck`
        self._kept: dict[Connection, dict[_Kept, None]] = {}  # without a task

    # ---- memq.broker.ingest.connection.Handler ------------------------------------------------------------

    def request(self, connection: Connection, frame: Frame) -> None:
        """Start to answer a request; HELLO is answered at once.

        Raises: ProtocolError, UnsupportedVersionError.
        """
        if self._tasks.stopped:
            connection.abort()  # the broker closes, and accepted this connection just before
            return
        if frame.api == Api.HELLO:
            self._hello(connection, frame)
            return
        if frame.api == Api.AUTHENTICATE:
            connection.send(self._authenticate(connection, frame))
            return
        working = self._working.setdefault(connection, {})
        most = REQUESTS_PER_CONNECTION_MAX
        if connection.program == BROKER_PROGRAM and self._services.permissions.may_be_broker(connection.principal.name):
            most = REQUESTS_PER_BROKER_MAX
        kept_bytes = 0
        if frame.api not in LIMITED:
            most, kept_bytes = most * 2, KEPT_BYTES
        error = self._too_much(len(working), len(frame.body), most, kept_bytes)
        if error is not None:
            connection.send(_error_frame(frame, error))
            return
        if frame.api in self._operations.kept and self._keep(connection, frame):
            return
        self._pending_bytes += len(frame.body)
        self._begin(connection, frame, self._answer(connection, frame), lambda: self._forget(frame))

    def forward(self, connection: Connection, request: int, slab: Slab, start: int, stop: int) -> None:
        """See `ingest.connection.Handler.forward`. The slab is kept until the block is in the queue."""
        if self._tasks.stopped:
            connection.abort()
            return
        frame = Frame(Api.FORWARD, 0, 0, request, slab.view[start:stop])
        error = self._too_much(len(self._working.setdefault(connection, {})), 0, REQUESTS_PER_CONNECTION_MAX)
        if error is not None:
            connection.send(_error_frame(frame, error))
            return
        slab.references += 1
        work = self._take_forward(connection, frame, slab, start)
        self._begin(connection, frame, work, lambda: self._services.pool.release(slab))

    def _begin(
        self, connection: Connection, frame: Frame, work: Coroutine[Any, Any, None], after: Callable[[], None]
    ) -> None:
        working = self._working[connection]
        task = self._tasks.start(work, Api(frame.api).name)
        working[task] = None

        def done(task: asyncio.Task[None]) -> None:
            working.pop(task, None)
            after()
            if not task.cancelled() and task.exception() is not None:
                connection.abort()  # an unexpected error ends its own connection only

        task.add_done_callback(done)

    def _keep(self, connection: Connection, frame: Frame) -> bool:
        """Keep a request until its handler replies, without a task. False: it must be answered by one."""
        try:
            operation, ask, _ = self._operations.find(frame, checksum_wanted=connection.checksums)
            if operation.keep is None:
                return False
            call = self._admitted(operation, connection, frame.stream, ask)
            kept = _Kept(operation, call, frame._replace(body=b""))
            if not operation.keep(call, partial(self._reply_later, kept)):
                return False
            if not kept.answered:
                self._kept.setdefault(connection, {})[kept] = None
            return True
        except MemqError as error:
            connection.send(_error_frame(frame, error))
            return True

    def _reply_later(self, kept: _Kept, answer: Answer | MemqError) -> None:
        """Answer a kept request, but not a second time."""
        if kept.answered:
            return
        kept.answered = True
        connection = kept.call.connection
        self._kept.get(connection, {}).pop(kept, None)
        self._send(connection, kept.frame, *_reply_frame(kept.frame, answer))

    def _note_work(self, connection: Connection, kept: _Kept | None) -> None:
        """Let a change of rules end the request of the current task, or no longer if it has its answer."""
        working, task = self._working.get(connection, {}), asyncio.current_task()
        if task in working:
            working[task] = kept

    def follow_limits(self, connection: Connection) -> None:
        """Apply the limits of now to a connection and its streams."""
        services, charged = self._services, connection.charged
        quotas = () if charged is None else services.quotas.limiters_of("principal", charged)
        connection.limiters = services.limits.of_client(connection.client) + quotas
        for stream in connection.streams.values():
            if stream.limiters is not None:
                stream.limiters = connection.limiters

    def recheck(self, connection: Connection) -> None:
        """End streams and waiting requests that the rules of permissions no longer allow."""
        if connection.login is not None and not self._services.logins.holds(connection.login.credential):
            connection.refuse(NotReadyError("the password of this user has changed", hint="connect again"))
            return
        opening = self._operations.of(Open)
        for stream in [stream for stream in connection.streams.values() if stream.open]:
            place = Resource(ResourceKind.PARTITION, f"{stream.target.topic.name}/{stream.target.partition}")
            try:
                self._services.permissions.check(
                    connection.principal.name, opening.needs_on([place]), opening.name, connection.peer
                )
            except MemqError:
                stream.open = False
                connection.send_redirect(stream, "")  # its producer opens it again, and gets the error
        for kept in list(self._kept.get(connection, {})):
            self._recheck_request(kept)
        for task, waiting in list(self._working.get(connection, {}).items()):
            if waiting is not None and not self._recheck_request(waiting):
                task.cancel()

    def _recheck_request(self, kept: _Kept) -> bool:
        """Refuse a waiting request that is no longer allowed; return whether it is."""
        try:
            self._check(kept.operation, kept.call)
        except MemqError as error:
            self._reply_later(kept, error)
            return False
        return True

    def _forget(self, frame: Frame) -> None:
        self._pending_bytes -= len(frame.body)

    def _too_much(self, waiting: int, size: int, most: int, kept_bytes: int = 0) -> MemqError | None:
        if size > REQUEST_BYTES_MAX:
            return TooLargeError(f"request of {size} bytes, {REQUEST_BYTES_MAX} are allowed")
        if waiting >= most:
            return ThrottledError(f"{waiting} requests of this connection are waiting for their answers")
        if self._pending_bytes + size > PENDING_BYTES_MAX + kept_bytes:
            return ThrottledError(f"requests of {self._pending_bytes} bytes are waiting for their answers")
        return None

    def disconnected(self, connection: Connection) -> None:
        """Stop answers to a closed connection."""
        for kept in self._kept.pop(connection, {}):
            kept.answered = True
        if connection.admitted:
            self._services.limits.disconnect(connection.client)
        if connection.charged is not None:
            self._services.quotas.disconnect(connection.charged)
        for task in list(self._working.pop(connection, {})):
            task.cancel()

    def _failed(self, error: BaseException) -> None:
        self._services.events.error("request-failed", repr(error), error)

    async def stop(self) -> None:
        """Stop all answers."""
        await self._tasks.stop()

    async def _answer(self, connection: Connection, frame: Frame) -> None:
        """Answer a request.

        Large answers borrow their bytes from a budget, and are made only for clients that read their answers.
        """
        limited = frame.api in LIMITED
        if limited and connection.limiters and not await self._let_in(connection, frame, connection.limiters):
            return
        at_once = frame.api in (Api.OPEN, Api.CLOSE)
        try:
            operation, ask, blocks = self._operations.find(frame, checksum_wanted=connection.checksums)
            call = self._call(connection, frame.stream, ask, blocks)
            await self._check_located(operation, call)
        except MemqError as error:
            if not at_once:
                await connection.outbox.writable()
            self._send(connection, frame, _error_frame(frame, error))
            return
        # After the check of permissions: a stranger uses nothing of a namespace.
        if limited and (limiters := self._limiters_of_namespaces(operation, call)):
            if not await self._let_in(connection, frame, limiters):
                return
            call = replace(call, limiters=limiters)
        if operation.recheck and operation.located is None:
            self._note_work(connection, _Kept(operation, call, frame._replace(body=b"")))
        if operation.prepare is not None:
            call = replace(call, attachment=await operation.prepare(ask))
        if at_once:
            await self._reply(frame, operation, call)
            return
        await connection.outbox.writable()
        lent = self._lent.get(operation.api)
        if lent is None:
            await self._reply(frame, operation, call)
            return
        async with lent.lend(operation.answer_bytes(ask)):
            with lent.lend_spare(operation.spare_bytes(ask)) as spare_bytes:
                await self._reply(frame, operation, replace(call, spare_bytes=spare_bytes))
                await connection.outbox.writable()  # until then the answer is in memory

    async def _take_forward(self, connection: Connection, frame: Frame, slab: Slab, start: int) -> None:
        try:
            ask, head_bytes = decode_forward(frame.body, checksum_wanted=connection.checksums)
        except MemqError as error:
            cause = as_damage(error) if connection.frame_checksums else error
            self._send(connection, frame, _error_frame(frame, cause))
            return
        if ask.request not in (0, frame.argument):  # an answer would settle another request
            connection.refuse(DamagedMessageError(f"damaged on its way: FORWARD {ask.request} as {frame.argument}"))
            return
        operation = self._operations.of(type(ask))
        try:
            call = self._admitted(operation, connection, frame.stream, ask)
        except MemqError as error:
            self._send(connection, frame, _error_frame(frame, error))
            return
        block = slab, start + head_bytes, start + len(frame.body)
        await self._reply(frame, operation, replace(call, attachment=block))

    def _limiters_of_namespaces(self, operation: Operation[Any], call: Call[Any]) -> Limiters:
        """Return the limiters of the namespaces whose resources a request of a client names."""
        quotas = self._services.quotas
        if not quotas.holds_namespaces or call.connection.charged is None:
            return ()
        resources = operation.resources(call)
        if operation.listing:  # which nobody is refused
            resources = [each for each in resources if call.access.may(operation.permission, each)]
        names = dict.fromkeys(map(namespace_of_resource, resources))
        return tuple(limiter for name in names for limiter in quotas.of_namespace(name))

    async def _let_in(self, connection: Connection, frame: Frame, limits: Limiters) -> bool:
        """Delay a request that is over one of these limits, or refuse it: then return False.

        A hard limit refuses at once, a quota after HELD_MS_MAX. Another soft limit lets the request in after one wait.
        """
        clock, size, limiters = self._services.runtime.clock, len(frame.body), limits
        flow = Flow.READS if frame.api in (Api.READ, Api.POLL) else Flow.REQUESTS
        now_s = clock.monotonic()
        end_s = now_s + HELD_MS_MAX / 1000
        while (refusal := refusal_of(limiters, now_s, flow)) is not None:
            limiter, error = refusal
            held = not refusal.hard and now_s < end_s and limiter.hold(size)
            text = f"{connection.peer}, {limiter.limit.mode}: {error}"
            self._services.events.info("over-limit", text, source=connection.host)
            if held:
                try:
                    await asyncio.sleep(min(error.retry_after_ms / 1000, end_s - now_s))
                finally:
                    limiter.release(size)
                now_s = clock.monotonic()
            elif refusal.hard or limiter.exact:
                connection.send(_error_frame(frame, error))
                return False
            if not limiter.exact:
                limiters = tuple(each for each in limiters if each.exact)
        for limiter in limits:
            limiter.take(1, 0)
            limiter.receive(size)
        return True

    def _admitted(self, operation: Operation[Any], connection: Connection, stream: int, ask: Any) -> Call[Any]:
        """Return the call of a request that the permissions of its principal allow.

        Raises: DeniedError, NotReadyError.
        """
        call = self._call(connection, stream, ask)
        self._check(operation, call)
        return call

    def _call(self, connection: Connection, stream: int, ask: Any, blocks: memoryview = NO_BLOCKS) -> Call[Any]:
        access = self._services.permissions.access_of(connection.principal.name)
        return Call(connection, connection.principal, stream, ask, blocks=blocks, access=access)

    async def _check_located(self, operation: Operation[Any], call: Call[Any]) -> None:
        """As `_check`, also when the resources must be looked up. Raises: as that; as the look-up."""
        checks = self._services.permissions
        if operation.located is None:
            self._check(operation, call)
        elif checks.enforced and not call.access.may_on_all(operation.permission, ResourceKind.TOPIC):
            needs = operation.needs_on(await operation.located(call))
            checks.check(call.principal.name, needs, operation.name, call.connection.peer)

    def _check(self, operation: Operation[Any], call: Call[Any]) -> None:
        checks = self._services.permissions
        if checks.enforced:
            checks.check(call.principal.name, operation.needs(call), operation.name, call.connection.peer)

    async def _answer_of(self, operation: Operation[Any], call: Call[Any]) -> Answer:
        """Return what the principal may see of the handler's answer. Raises: as the handler; DeniedError."""
        checks = self._services.permissions
        version = checks.version
        answer = await operation.handler(call)
        if not checks.enforced:
            return answer
        if operation.recheck and checks.version != version:
            await self._check_located(operation, call)
        return answer if operation.shown is None else operation.shown(call, answer)

    async def _reply(self, frame: Frame, operation: Operation[Any], call: Call[Any]) -> None:
        """Call the handler, and send its answer or its error.

        If the rules changed meanwhile, a stream that it opened may be no longer allowed.
        """
        version = self._services.permissions.version
        try:
            reply = _reply_frame(frame, await self._answer_of(operation, call))
        except MemqError as error:
            reply = _reply_frame(frame, error)
        self._note_work(call.connection, None)
        self._send(call.connection, frame, *reply, limiters=call.limiters)
        if self._services.permissions.version != version:
            self.recheck(call.connection)

    def _send(
        self, connection: Connection, frame: Frame, prefix: bytes, body: bytes = b"", *, limiters: Limiters = ()
    ) -> None:
        if connection.closed:
            return
        if frame.api in LIMITED:
            for limiter in connection.limiters + limiters:
                limiter.owe(len(body))
        connection.send(prefix, body)

    def _hello(self, connection: Connection, frame: Frame) -> None:
        hello = decode_message(frame.body, Hello)
        connection.checksums = is_sealed(frame.body)
        connection.program = hello.client.partition("/")[0]
        version = check_version(hello.least_version, hello.greatest_version)
        host = connection.peer.rpartition(":")[0]
        connection.client = check_name(hello.client_id, "client") if hello.client_id else host
        if hello.scram:
            connection.hello = hello
            connection.login, delay_s = self._services.logins.begin(hello.scram, connection.host)
            challenge = encode_frame(
                Api.AUTHENTICATE, 0, 0, encode_message(Authenticate(scram=connection.login.challenge))
            )
            if delay_s:
                asyncio.get_running_loop().call_later(delay_s, _send_to_open, connection, challenge)
            else:
                connection.send(challenge)
            return
        self._identify(connection, hello.token)
        connection.send(self._accept(connection, hello, version))

    def _authenticate(self, connection: Connection, frame: Frame) -> bytes:
        """Give the connection the principal of its user. Raises: DeniedError, ProtocolError."""
        hello, login = connection.hello, connection.login
        assert hello is not None, "the conversation allows it after a HELLO with a login"
        assert login is not None, "as above"
        proof = decode_message(frame.body, Authenticate).scram
        verdict = self._services.logins.end(login, proof, connection.host, connection.peer)
        connection.principal, connection.hello = Principal(login.credential.user), None
        version = check_version(hello.least_version, hello.greatest_version)
        return self._accept(connection, hello, version, verdict)

    def _accept(self, connection: Connection, hello: Hello, version: int, verdict: str = "") -> bytes:
        self._charge(connection)
        self._services.limits.connect(connection.client)
        connection.admitted = True
        self.follow_limits(connection)
        settings = self._services.settings
        answer = HelloAnswer(
            version=version,
            broker=settings.broker_id,
            cluster=settings.cluster,
            memq=VERSION,
            audit_ms=settings.audit_interval_ms if settings.audit else 0,
            frame_checksums=hello.frame_checksums,
            scram=verdict,
        )
        connection.frame_checksums = hello.frame_checksums
        return encode_frame(Api.HELLO, 0, HELLO_MAGIC, encode_message(answer))

    def _charge(self, connection: Connection) -> None:
        """Count the connection for the quota of its principal. Brokers have none. Raises: OverLimitError.

        Without `broker_principals`, a broker is known by its program.
        """
        services, principal = self._services, connection.principal.name
        broker = services.permissions.is_broker(principal)
        if not services.settings.quotas or (connection.program in BROKER_PROGRAMS if broker is None else broker):
            return
        services.quotas.connect(principal)
        connection.charged = principal

    def _identify(self, connection: Connection, token: str) -> None:
        """Give the connection the principal of its token. Raises: DeniedError."""
        tokens, clock = self._services.tokens, self._services.runtime.clock
        if tokens is None:
            return
        if token:
            bearer = tokens.bearer(token)
            connection.principal = bearer.principal
            connection.token_ends_s = clock.monotonic() + bearer.ends_s - clock.wall_ms() / 1_000
        elif tokens.required and connection.principal == ANONYMOUS:
            raise DeniedError(
                "this broker wants a token or a certificate of each client", hint="set token_file of memq.Tls"
            )


def _send_to_open(connection: Connection, frame: bytes) -> None:
    """Send a frame unless the connection was closed meanwhile."""
    if not connection.closed:
        connection.send(frame)


def _reply_frame(frame: Frame, answer: Answer | MemqError) -> tuple[bytes, bytes]:
    """Return the two pieces of an answer. Raises: as the encoders of frames."""
    if isinstance(answer, MemqError):
        return _error_frame(frame, answer), b""
    if isinstance(answer, WithBlocks):
        body = b"".join(answer.blocks)
        return encode_with_blocks(frame.api, frame.argument, encode_message(answer.message), len(body)), body
    body = answer if isinstance(answer, bytes) else encode_message(answer)
    return encode_prefix(frame.api, frame.stream, frame.argument, len(body)), body


def _error_frame(frame: Frame, error: MemqError) -> bytes:
    return encode_frame(Api.ERROR, frame.stream, frame.argument, encode_message(nack_of(error)))

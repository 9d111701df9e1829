"""kazoo behind the event loop: one session, its calls as coroutines, its errors as memq's.

kazoo has threads of its own. They reach the event loop only through `call_soon_threadsafe`. The loop never blocks on
them: `end_client`, which does, runs in a thread. While the session is suspended, kazoo gets no requests. Otherwise it
would send them after the reconnection, when their callers have given up.

`make_client` configures kazoo's clients, and `SocketHandler` their sockets. `ZooKeeperConnection` handles unreadable
answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    BadArgumentsError,
    BadVersionError,
    ConnectionDropped,
    InvalidACLError,
    KazooException,
    MarshallingError,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
    SessionClosedRequireSaslError,
    SessionExpiredError,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.connection import ConnectionHandler, RWServerAvailable
from kazoo.protocol.states import KazooState, KeeperState
from kazoo.security import ACL, ANYONE_ID_UNSAFE, CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, Permissions

from memq.errors import (
    AlreadyExistsError,
    ClosedError,
    DeniedError,
    InvalidRequestError,
    InvalidSettingError,
    MemqError,
    NotFoundError,
    TooLargeError,
    UnreachableError,
    VersionConflictError,
)
from memq.governor.zookeeper.security import SocketHandler, check_tools, refusal_in
from memq.governor.zookeeper.settings import ZookeeperAddress, ZookeeperSettings
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.runtime.threads import ThreadPool

CALLS_AT_ONCE_MAX = 500  # the time-out of a call is the session's: of 10,000 at once the last would exceed it
RETRY_DELAY_S_MAX = 2
# States of a client whose credentials were refused: it does not connect again. The last one follows the first.
_GIVEN_UP = (KeeperState.AUTH_FAILED, KeeperState.CLOSED)
# Errors that kazoo's own loop handles: it connects again, or ends the session.
_HANDLED = (ConnectionDropped, KazooTimeoutError, AuthFailedError, SessionExpiredError, RWServerAvailable)


class ZooKeeperConnection(ConnectionHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's connection. It reconnects after an unreadable answer, which would end kazoo's loop."""

    def _connect(self, *args: Any) -> Any:
        return _readable(super()._connect, *args)

    def _read_socket(self, *args: Any) -> Any:
        return _readable(super()._read_socket, *args)


def _readable(read: Any, *args: Any) -> Any:
    try:
        return read(*args)
    except _HANDLED:
        raise
    except Exception as error:
        raise ConnectionDropped(f"an answer that can't be read: {error!r}") from error


class KazooLog(logging.Handler):
    """Log of one kazoo client: its last warning explains a failed connect; errors go to memq's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""
        self.warnings = 0
        self.logger = logging.Logger("memq.kazoo", logging.WARNING)  # noqa: LOG001 - it belongs to one client, and is deleted with it
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Note a warning, in a thread of kazoo."""
        self.last = record.getMessage()
        self.warnings += 1
        if record.levelno >= logging.ERROR:
            logging.getLogger(record.name).handle(record)


def make_client(address: ZookeeperAddress, settings: ZookeeperSettings, logger: logging.Logger) -> Any:
    """Return a kazoo client that tries to connect for ever."""
    sasl = {
        "mechanism": settings.sasl_mechanism,
        "username": settings.sasl_username,
        "password": settings.sasl_password,
        "service": settings.sasl_service,
        "principal": settings.sasl_principal,
    }
    scheme, _, credential = settings.auth.partition(":")
    try:
        client = KazooClient(
            hosts=address.hosts,
            timeout=settings.session_timeout_ms / 1000,
            default_acl=acl_of(settings.acl),
            auth_data=[(scheme, credential)] if settings.auth else None,
            sasl_options={key: value for key, value in sasl.items() if value} if settings.sasl_mechanism else None,
            connection_retry={"max_tries": -1, "delay": 0.1, "max_delay": RETRY_DELAY_S_MAX},
            logger=logger,
            handler=SocketHandler(settings),
        )
    except (KazooException, ValueError) as error:
        raise InvalidSettingError(f"ZooKeeper can't be reached as the settings say: {error}") from error
    plain = client._connection
    client._connection = ZooKeeperConnection(
        client, plain.retry_sleeper, logger=logger, sasl_options=plain.sasl_options
    )
    return client


def end_client(client: Any) -> None:
    """End a client's session and its threads; it waits for them."""
    try:
        client.stop()
    finally:
        client.close()


def acl_of(name: str) -> list[Any]:
    """Return the ACL of every node that memq creates."""
    if name == "open":
        return list(OPEN_ACL_UNSAFE)
    readers = [ACL(Permissions.READ, ANYONE_ID_UNSAFE)] if name == "creator-or-read" else []
    return [*CREATOR_ALL_ACL, *readers]


@dataclass(frozen=True, slots=True)
class Node:
    """A node: content, version, session (0: it is persistent), and its time in Unix ms (0: unknown)."""

    data: bytes
    version: int
    session: int
    modified_ms: int = 0


@dataclass(frozen=True, slots=True)
class CreateNode:
    """Operation: create a node that does not exist."""

    path: str
    data: bytes = b""
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class SetData:
    """Operation: replace the content of a node of this version; -1 is any version."""

    path: str
    data: bytes
    version: int = -1


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """Operation: delete a node of this version; -1 is any version."""

    path: str
    version: int = -1


@dataclass(frozen=True, slots=True)
class CheckVersion:
    """Operation: fail the transaction unless the node has this version."""

    path: str
    version: int


Operation = CreateNode | SetData | DeleteNode | CheckVersion


class ZookeeperSession:
    """A session below one node. `connected` is called, on the loop, after each connection.

    Its argument is True for a new session. The first call connects.
    Raises, every call: UnreachableError without a connection or an answer within the session's time-out, DeniedError,
    ClosedError.
    """

    def __init__(
        self,
        address: ZookeeperAddress,
        settings: ZookeeperSettings,
        events: EventLog,
        connected: Callable[[bool], None],
    ) -> None:
        self._address = address
        self._settings = settings
        self._events = events
        self.connected = connected
        self._client: Any = None
        self._spare: Any = None  # a client without a session, while `_client` can't connect
        self._renewal: asyncio.TimerHandle | None = None
        self._tasks = TaskOwner(lambda error: events.error("zookeeper-failed", repr(error), error), events)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._up = asyncio.Event()
        self._was_up = False
        self._lost = True  # since the last connection
        self._closed = False
        self._kazoo_log = KazooLog()
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE_MAX)
        self._end_pool = ThreadPool("zookeeper", 1)

    @property
    def up(self) -> bool:
        """Whether the session is connected, as far as this process knows."""
        return self._up.is_set() and self._client is not None and bool(self._client.connected)

    @property
    def identity(self) -> tuple[int, bytes]:
        """The number of the session, 0 without one, and its password; a client with both can continue it."""
        identity = self._client.client_id if self._client is not None else None
        return (int(identity[0] or 0), bytes(identity[1])) if identity else (0, b"")

    @property
    def number(self) -> int:
        """The number of the session, 0 without one."""
        return self.identity[0]

    # ---- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect once. Calls wait for the first connection; later, calls without a connection fail at once.

        Raises: UnreachableError, DeniedError, ClosedError, InvalidSettingError.
        """
        if self._closed:
            raise ClosedError("the coordinator is closed")
        before = self._kazoo_log.warnings
        if self._client is None:
            check_tools(self._settings)
            self._loop = asyncio.get_running_loop()
            self._client = self._begin()
        if self._was_up:
            self._connected_client()
            return
        try:
            async with asyncio.timeout(self._settings.connect_timeout_ms / 1000):
                await self._up.wait()
        except TimeoutError as error:
            self._schedule_renewal()  # a client whose credentials were refused does not connect again
            raise self._unreachable(refused=self._kazoo_log.warnings > before) from error

    async def close(self) -> None:
        """End the session; ZooKeeper removes its ephemeral nodes. Closing twice is fine."""
        self._closed = True
        self._up.clear()
        if self._renewal is not None:
            self._renewal.cancel()
        await self._tasks.stop()
        for client in (self._client, self._spare):
            if client is not None:
                await self._end(client)
        self._client = self._spare = None
        await self._end_pool.close()

    def _begin(self) -> Any:
        """Return a client that connects with a new session."""
        client = make_client(self._address, self._settings, self._kazoo_log.logger)
        client.add_listener(partial(self._state_changed, client))
        client.start_async()
        return client

    async def _end(self, client: Any) -> None:
        try:
            await self._end_pool.run(end_client, client)
        except KazooException as error:
            self._events.warning("zookeeper-close-failed", f"{self._address.hosts}: {error!r}")

    def _state_changed(self, client: Any, state: str) -> None:
        """Pass a state to the loop. kazoo calls this in a thread of its own."""
        assert self._loop is not None, "a state before the start"
        with suppress(RuntimeError):  # the loop has ended: no caller is left
            self._loop.call_soon_threadsafe(self._take_state, client, state)

    def _schedule_renewal(self) -> None:
        """While there is no connection, try periodically whether a client with a new session gets one.

        Theory: a client sends the id of the newest change that it saw, and ZooKeeper refuses a client that saw more
        than the server. That protects against a server that lags. But if ZooKeeper was restored from an old backup, it
        refuses the client for ever. The wait is as long as the session, which has ended by then. After a mere
        disconnection, the old client reconnects first, within a retry or two.
        """
        if self._renewal is None and self._loop is not None:
            wait_s = max(self._settings.session_timeout_ms / 1000, 2.0 * RETRY_DELAY_S_MAX)
            self._renewal = self._loop.call_later(wait_s, self._renew)

    def _renew(self) -> None:
        self._renewal = None
        if self._closed or self._up.is_set():
            return
        self._schedule_renewal()  # first: `_begin` raises if no thread can be started, and must be tried again
        if self._spare is not None and self._spare.client_state in _GIVEN_UP:
            refused, self._spare = self._spare, None
            self._tasks.start(self._end(refused), "end a client")
        if self._spare is None:
            self._spare = self._begin()
        elif self._spare.connected:
            old, self._client, self._spare = self._client, self._spare, None
            self._tasks.start(self._end(old), "end a client")
            self._lost = True
            self._events.warning("zookeeper-renewed", f"{self._address.hosts} refuses the old session")
            self._take_state(self._client, KazooState.CONNECTED)

    def _take_state(self, client: Any, state: str) -> None:
        if self._closed or client is not self._client:
            return
        if state == KazooState.CONNECTED:
            spare, self._spare = self._spare, None
            if spare is not None:
                self._tasks.start(self._end(spare), "end a client")
            lost, self._lost = self._lost, False
            self._events.info("zookeeper-connected", f"{self._address.hosts} session {self.number:x}")
            self._up.set()
            self._was_up = True
            self._kazoo_log.last = ""
            self.connected(lost)
        else:
            self._up.clear()
            self._lost = self._lost or state == KazooState.LOST
            if state == KazooState.LOST:
                self._events.warning("zookeeper-lost", f"the session with {self._address.hosts} is lost")
            else:
                self._events.warning("zookeeper-suspended", f"{self._address.hosts} do not answer")
            self._schedule_renewal()

    def _unreachable(self, *, refused: bool = False) -> MemqError:
        """Return the error for a missing connection; `refused`: kazoo has logged the cause during the call.

        A refusal explains the error. It makes it a denial only for a start: a running ZooKeeper may be down, too.
        """
        hosts, last = self._address.hosts, self._kazoo_log.last
        refusal = refusal_in(last)
        if refusal is not None and refused:
            return DeniedError(f"ZooKeeper at {hosts} {refusal.text}: {last}", hint=refusal.hint)
        return UnreachableError(
            f"ZooKeeper at {hosts} does not answer" + (f": {last}" if last else ""),
            hint=refusal.hint if refusal is not None else "check the coordinator's URL, and that ZooKeeper runs",
        )

    # ---- calls -----------------------------------------------------------------------------------

    async def read(self, path: str, watch: Callable[[], None] | None = None) -> Node:
        """Return a node; `watch` is called once, on the loop, after a change or a loss of the connection.

        Raises: NotFoundError.
        """
        data, stat = await self._call("get_async", path, watch=self._on_loop(watch))
        return Node(data or b"", stat.version, stat.ephemeralOwner, stat.mtime)

    async def find(self, path: str, watch: Callable[[], None] | None = None) -> Node | None:
        """Return a node; None when two operations report that it is absent; `watch` as for `exists`."""
        while True:
            try:
                return await self.read(path, watch)
            except NotFoundError:
                if not await self.exists(path, watch):
                    return None

    async def catch_up(self, path: str) -> None:
        """Wait until this session's server has all changes from before the call."""
        await self._call("sync_async", path)

    async def exists(self, path: str, watch: Callable[[], None] | None = None) -> bool:
        """Return whether a node exists; `watch` as for `read`, also when the node is created."""
        return await self._call("exists_async", path, watch=self._on_loop(watch)) is not None

    async def children(self, path: str, watch: Callable[[], None] | None = None) -> list[str]:
        """Return the names below a node, sorted; `watch` as for `read`. Raises: NotFoundError."""
        return sorted(await self._call("get_children_async", path, watch=self._on_loop(watch)))

    async def change(self, *operations: Operation) -> None:
        """Do all operations or none.

        Raises: NotFoundError, AlreadyExistsError, VersionConflictError, TooLargeError.
        After an UnreachableError the outcome is unknown.
        """
        await self.start()
        async with self._turns:
            transaction = self._connected_client().transaction()
            for operation in operations:
                _add(transaction, operation, self._address.path + operation.path)
            results = await self._answer(transaction.commit_async(), operations[0].path)
        for operation, result in zip(operations, results, strict=True):
            if isinstance(result, Exception) and not isinstance(result, RolledBackError | RuntimeInconsistency):
                raise self._error(result, operation.path) from result

    async def create_missing(self, paths: Sequence[str]) -> None:
        """Create the node of the URL, and the nodes `paths` below it, if they do not exist."""
        for path in ("", *paths):
            await self._call("ensure_path_async", path)

    async def _call(self, method: str, path: str, **options: object) -> Any:
        await self.start()
        async with self._turns:
            request = getattr(self._connected_client(), method)
            return await self._answer(request(self._address.path + path, **options), path)

    def _connected_client(self) -> Any:
        if not self.up:
            raise self._unreachable()
        return self._client

    async def _answer(self, result: Any, path: str) -> Any:
        """Wait for the result that a thread of kazoo sets, for the session's time-out at most."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(error: BaseException | None, value: object) -> None:
            if not future.done() and error is not None:
                future.set_exception(error)
            elif not future.done():
                future.set_result(value)

        def done(result: Any) -> None:
            error = result.exception
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, error, None if error is not None else result.value)

        result.rawlink(done)
        try:
            async with asyncio.timeout(self._settings.session_timeout_ms / 1000):
                return await future
        except TimeoutError as error:
            raise self._unreachable() from error
        except Exception as error:  # also any error of kazoo about an unreadable answer
            raise self._error(error, path) from error

    def _error(self, error: Exception, path: str) -> MemqError:
        return _error(error, self._address.path + path, self._address.hosts)

    def _on_loop(self, watch: Callable[[], None] | None) -> Callable[[object], None] | None:
        if watch is None:
            return None
        loop = asyncio.get_running_loop()

        def fired(event: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(watch)

        return fired


def _add(transaction: Any, operation: Operation, path: str) -> None:
    if isinstance(operation, CreateNode):
        transaction.create(path, operation.data, ephemeral=operation.ephemeral)
    elif isinstance(operation, SetData):
        transaction.set_data(path, operation.data, operation.version)
    elif isinstance(operation, DeleteNode):
        transaction.delete(path, operation.version)
    else:
        transaction.check(path, operation.version)


def _denied(text: str) -> DeniedError:
    return DeniedError(text, hint="check auth, acl and sasl in [zookeeper], and the rights of the node")


def _error(error: Exception, path: str, hosts: str) -> MemqError:
    """Return memq's error for an error of kazoo."""
    if isinstance(error, NoNodeError):
        return NotFoundError(f"node {path} does not exist")
    if isinstance(error, NodeExistsError):
        return AlreadyExistsError(f"node {path} exists already")
    if isinstance(error, BadVersionError | NotEmptyError):
        return VersionConflictError(f"node {path} was changed meanwhile")
    if isinstance(error, NoAuthError | AuthFailedError | InvalidACLError | SessionClosedRequireSaslError):
        return _denied(f"ZooKeeper at {hosts} denies access to node {path}")
    if isinstance(error, BadArgumentsError | NoChildrenForEphemeralsError):
        return InvalidRequestError(
            f"ZooKeeper at {hosts} does not accept a node {path}: {error!r}",
            hint="name another path in the coordinator's URL",
        )
    if isinstance(error, MarshallingError):
        return TooLargeError(f"node {path} is larger than ZooKeeper allows", hint="raise its jute.maxbuffer")
    return UnreachableError(
        f"ZooKeeper at {hosts} did not answer for node {path}: {error!r}", hint="check that ZooKeeper runs"
    )

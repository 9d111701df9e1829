"""Early takeovers in ZooKeeper: one node names the sessions that ended before ZooKeeper ended them.

The node of the suspect is not removed. The node of a broker that restarts has version 0 again, as its former node had,
so a removal by compare-and-set could remove the new registration. A session is used once. So the persistent node
`/takeovers` names it, and every reader of the membership leaves it out. All changes of that node are compare-and-set.

A damaged node `/takeovers` counts as empty: a broker that was taken over is then a member again, until its session ends
or the next early takeover. Epochs and terms keep data safe meanwhile. The governor empties the node.
"""

from __future__ import annotations

from collections.abc import Callable

from memq.errors import AlreadyExistsError, CorruptDataError, NotFoundError, TermFencedError, VersionConflictError
from memq.governor import BrokerEntry
from memq.governor.registry import Takeover, has_successor, may_take_over, with_return, with_takeover
from memq.governor.zookeeper import layout
from memq.governor.zookeeper.layout import Government
from memq.governor.zookeeper.mirror import Mirror
from memq.governor.zookeeper.session import (
    CheckVersion,
    CreateNode,
    DeleteNode,
    Node,
    Operation,
    SetData,
    ZookeeperSession,
)
from memq.runtime.logs import EventLog


class Takeovers:
    """The node `/takeovers` of one coordinator, and the governor's role, which it can end."""

    def __init__(
        self, session: ZookeeperSession, mirror: Mirror, changed: Callable[[], None], events: EventLog
    ) -> None:
        """`changed` is called after each change, also after one that may have happened."""
        self._session = session
        self._mirror = mirror
        self._changed = changed
        self._damage = events.outage("takeovers-damaged", "takeovers-emptied")

    async def ended(self) -> frozenset[str]:
        """Return the sessions that early takeovers ended. Raises: UnreachableError."""
        return _ended(self._known(await self._mirror.node(layout.TAKEOVERS)))

    async def repair(self) -> None:
        """Empty the node if it is damaged."""
        node = await self._mirror.node(layout.TAKEOVERS)
        if node is not None and node.data and not self._known(node):
            await self._put((), node)

    async def government(self) -> tuple[Government | None, Node | None]:
        """Return the governor, None without one, and its node, which an early takeover leaves behind."""
        node = await self._mirror.node(layout.GOVERNOR)
        held = None if node is None else layout.decode(layout.GOVERNOR, node.data, Government)
        return (None if held is None or held.session in await self.ended() else held), node

    async def begin_term(self, broker: BrokerEntry) -> int:
        """Make a registered broker the governor in a new term; return 0 if another one was faster.

        The new node replaces that of a governor that was taken over. The replaced node must have the last term: then
        compare-and-set on the term shows that the node was not replaced in between.
        """
        path = layout.broker_path(broker.id)
        entry, left = await self._session.find(path), await self._session.find(layout.GOVERNOR)
        ended = await self.ended()
        registered = entry is not None and layout.decode(path, entry.data, BrokerEntry).session == broker.session
        if not registered or broker.session in ended:
            return 0
        term = await self._session.read(layout.TERM)
        operations: list[Operation] = []
        if left is not None:
            held = layout.decode(layout.GOVERNOR, left.data, Government)
            if held.session not in ended or held.term != term.version:
                return 0
            operations.append(DeleteNode(layout.GOVERNOR, left.version))
        begun = Government(id=broker.id, session=broker.session, term=term.version + 1)
        operations.append(CreateNode(layout.GOVERNOR, layout.encode(begun), ephemeral=True))
        operations.append(SetData(layout.TERM, b"", term.version))
        try:
            await self._session.change(*operations)
        except (AlreadyExistsError, NotFoundError, VersionConflictError):
            return 0  # another broker was faster; the watch on its node reports its end
        finally:
            self._mirror.forget(layout.GOVERNOR)
            self._changed()
        return begun.term

    async def take_over(self, suspect: BrokerEntry, term: int, now_ms: int) -> bool:
        """See `Coordinator.take_over`."""
        path = layout.broker_path(suspect.id)
        node = await self._session.find(path)
        last = await self._session.read(layout.TERM)
        if term and last.version != term:
            raise TermFencedError(f"term {term} of the governor has ended, the last one is {last.version}")
        stored = await self._session.find(layout.TAKEOVERS)
        known = self._known(stored)
        if stored is None or node is None or layout.decode(path, node.data, BrokerEntry) != suspect:
            return False
        if not may_take_over(known, suspect, now_ms):
            return False
        if not term and not await self._governs(suspect, last.version):
            return False
        brokers, ended = await self._registered(), _ended(known)
        if not has_successor((each for each in brokers if each.session not in ended), suspect):
            return False
        after = with_takeover(known, suspect, now_ms, frozenset(each.session for each in brokers))
        return await self._put(after, stored, CheckVersion(path, node.version), CheckVersion(layout.TERM, last.version))

    async def note_return(self, session: str) -> None:
        """Note that a session which an early takeover ended has registered again."""
        while True:
            stored = await self._session.find(layout.TAKEOVERS)
            known = self._known(stored)
            after = with_return(known, session)
            if stored is None or after == known or await self._put(after, stored):
                return

    def _known(self, node: Node | None) -> tuple[Takeover, ...]:
        """Return the early takeovers in a node; none in a damaged one."""
        try:
            found = layout.decode_takeovers(node.data if node else b"")
        except CorruptDataError as error:
            self._damage.failed(f"{error}; early takeovers before now do not count, and the governor empties the node")
            return ()
        self._damage.passed()
        return found

    async def _registered(self) -> list[BrokerEntry]:
        """Return all registrations, also those that were taken over."""
        paths = [layout.broker_path(name) for name in await self._mirror.children(layout.BROKERS)]
        found = zip(paths, await self._mirror.nodes(paths), strict=True)
        return [layout.decode(path, node.data, BrokerEntry) for path, node in found if node]

    async def _governs(self, suspect: BrokerEntry, term: int) -> bool:
        node = await self._session.find(layout.GOVERNOR)
        if node is None:
            return False
        held = layout.decode(layout.GOVERNOR, node.data, Government)
        return held.session == suspect.session and held.term == term

    async def _put(self, takeovers: tuple[Takeover, ...], stored: Node, *checks: CheckVersion) -> bool:
        """Replace the node; return False when it, or a checked node, was changed in between."""
        data = layout.encode(takeovers) if takeovers else b""
        try:
            await self._session.change(SetData(layout.TAKEOVERS, data, stored.version), *checks)
        except (NotFoundError, VersionConflictError):
            return False
        finally:
            self._mirror.forget(layout.TAKEOVERS)
            self._changed()
        return True


def _ended(takeovers: tuple[Takeover, ...]) -> frozenset[str]:
    return frozenset(each.session for each in takeovers if not each.registered_again)

"""The rules of permissions in ZooKeeper: one node, whose version makes a change a compare-and-set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from memq.errors import AlreadyExistsError, NotFoundError, VersionConflictError
from memq.governor.zookeeper import layout
from memq.governor.zookeeper.session import CreateNode, Node, SetData, ZookeeperSession
from memq.permissions import RuleSet, encode_rules


class ZookeeperRules:
    """See `memq.governor.RuleKeeper`. `opened` connects first."""

    def __init__(self, session: ZookeeperSession, opened: Callable[[], Awaitable[None]]) -> None:
        self._session = session
        self._opened = opened

    async def read(self) -> RuleSet:
        """See `RuleKeeper.read`. Raises: CorruptDataError, too."""
        return _rules_in(await self._node())

    async def replace(self, changed: RuleSet) -> RuleSet:
        """See `RuleKeeper.replace`. Raises: CorruptDataError, too."""
        node = await self._node()
        found = _rules_in(node)
        if changed.version != found.version + 1:
            return found
        path, data = layout.RULES, encode_rules(changed)
        operation = CreateNode(path, data) if node is None else SetData(path, data, node.version)
        with suppress(AlreadyExistsError, NotFoundError, VersionConflictError):  # another broker was faster
            await self._session.change(operation)
        return await self.read()

    async def _node(self) -> Node | None:
        await self._opened()
        await self._session.catch_up(layout.RULES)
        return await self._session.find(layout.RULES)


def _rules_in(node: Node | None) -> RuleSet:
    return RuleSet() if node is None else layout.decode_rules(node.data)

"""What nodes hold, decoded once for each version: who reads all of a large cluster again decodes what changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from memq.governor.zookeeper.session import Node

Value = TypeVar("Value")


class Decoded(Generic[Value]):
    """Values of one kind, each beside the node that it was decoded from."""

    def __init__(self, decode: Callable[[str, Node], Value]) -> None:
        self._decode = decode
        self._kept: dict[str, tuple[Node, Value]] = {}

    def values(self, paths: Sequence[str], nodes: Sequence[Node | None]) -> list[Value]:
        """Return what the nodes hold that are there, in this order. Only these are kept. Raises: CorruptDataError."""
        kept: dict[str, tuple[Node, Value]] = {}
        for path, node in zip(paths, nodes, strict=True):
            if node is None:
                continue
            known = self._kept.get(path)
            kept[path] = known if known is not None and known[0] is node else (node, self._decode(path, node))
        self._kept = kept
        return [value for _, value in kept.values()]

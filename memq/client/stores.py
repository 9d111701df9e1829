"""Opens the cluster's stores in the client's own process, where their address is one that can be opened here."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from memq.client.fetcher import RangeReader
from memq.client.metadata import ClusterMetadata
from memq.storage_handlers.filesystem import FilesystemHandler

_THREADS_MAX = 4


class OpenStores:
    """The stores that metadata names, opened on demand; only those of `file:` can be so far."""

    def __init__(self, metadata: ClusterMetadata) -> None:
        self._metadata = metadata
        self._opened: dict[str, FilesystemHandler] = {}

    def __call__(self, store: str) -> RangeReader | None:
        """Return a reader of the store; None when there is no way to it from here."""
        if store in self._opened:
            return self._opened[store]
        for known in self._metadata.stores:
            parts = urlsplit(known.url)
            if known.name == store and parts.scheme == "file" and not parts.netloc:
                root = Path(url2pathname(parts.path))
                if root.is_dir():
                    self._opened[store] = FilesystemHandler(root, root, _THREADS_MAX)
                    return self._opened[store]
        return None

    async def close(self) -> None:
        """End the threads of what was opened."""
        for handler in self._opened.values():
            await handler.close()
        self._opened.clear()

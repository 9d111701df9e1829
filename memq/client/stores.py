"""Opens the cluster's stores in the client's own process, where their address is one that can be opened here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from memq.client.metadata import ClusterMetadata
from memq.errors import MemqError
from memq.network import Runtime
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.filesystem import FilesystemHandler

_THREADS_MAX = 4
# A broker can read for us: a store that can't be reached from here must not hold a reader up for half a minute.
_S3_TIMES = {"connect_timeout_ms": 2_000, "request_timeout_ms": 5_000, "deadline_ms": 6_000}


class OpenStores:
    """The stores that metadata names, opened on demand: folders that are here, and buckets that there are keys for."""

    def __init__(self, metadata: ClusterMetadata, runtime: Runtime) -> None:
        self._metadata = metadata
        self._runtime = runtime
        self._opened: dict[str, StorageHandler] = {}

    def __call__(self, store: str) -> StorageHandler | None:
        """Return a reader of the store; None when there is no way to it from here."""
        if store in self._opened:
            return self._opened[store]
        for known in self._metadata.stores:
            opener = _OPENERS.get(urlsplit(known.url).scheme)
            handler = opener(known.url, self._runtime) if known.name == store and opener is not None else None
            if handler is not None:
                self._opened[store] = handler
                return handler
        return None

    async def close(self) -> None:
        """End the threads and connections of what was opened."""
        for handler in self._opened.values():
            await handler.close()
        self._opened.clear()


def _open_folder(url: str, runtime: Runtime) -> StorageHandler | None:
    """Return a store of files; None when its folder is not on this machine."""
    parts = urlsplit(url)
    root = Path(url2pathname(parts.path))
    return FilesystemHandler(root, root, _THREADS_MAX) if not parts.netloc and root.is_dir() else None


def _open_bucket(url: str, runtime: Runtime) -> StorageHandler | None:
    """Return a store in S3, with the keys that boto3 finds; None when the extra or the keys are missing here."""
    from memq.storage_handlers.s3 import open_store  # it takes its time, and few need it

    try:
        return open_store(url, runtime, {name: (value, "the client") for name, value in _S3_TIMES.items()})
    except MemqError:
        return None


_OPENERS: dict[str, Callable[[str, Runtime], StorageHandler | None]] = {"file": _open_folder, "s3": _open_bucket}

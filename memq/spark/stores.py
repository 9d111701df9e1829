"""Stores in a Spark task, opened by address with the keys of its machine; its memory settings."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit
from urllib.request import url2pathname

from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.client.stores import own_endpoints
from memq.errors import DeniedError, InvalidSettingError, MemqError
from memq.format.blocks.header import Buffer
from memq.runtime.logs import EventLog
from memq.runtime.process import keep_freed_blocks
from memq.runtime.runtime import Runtime
from memq.settings import environment_settings
from memq.spark.options import ReadOptions
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from memq.storage_handlers.filesystem import FilesystemHandler

_THREADS_MAX = 4
ANY = ""  # the name of a store that means all


@cache
def begin_tasks() -> None:
    """Once per process: keep freed blocks, and exclude imports from garbage collection.

    PySpark's worker collects all garbage after each task. That traversed all objects of PySpark, Arrow and memq, and
    took 45 ms of CPU, most of the cost of a task.
    """
    keep_freed_blocks()
    gc.freeze()


@dataclass(frozen=True, slots=True)
class StoreUrls:
    """The URLs of stores by name, and the path of a settings file.

    It has no keys, because it is sent to tasks.
    """

    urls: Mapping[str, str]
    config: str | None = None
    profile: str | None = None

    @classmethod
    def of(cls, options: ReadOptions, known: Mapping[str, str]) -> StoreUrls:
        """Return the stores of options and brokers; the option `store` replaces all others."""
        return cls({ANY: options.store} if options.store else dict(known), options.config, options.profile)


class TaskStores:
    """The stores of one task, opened on demand. `close` or `async with` ends threads and connections."""

    def __init__(self, urls: StoreUrls, runtime: Runtime) -> None:
        self._urls = urls
        self._runtime = runtime
        self._opened: dict[str, StorageHandler] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exit_: object) -> None:
        await self.close()

    def fetcher(self, missing_s: float) -> BatchFetcher:
        """Return a fetcher for batches in the stores; it retries missing objects for `missing_s`."""
        confirmed = ConfirmedReads(EventLog(self._runtime.clock), missing_s=missing_s)
        return BatchFetcher("direct", _no_broker, self.open, confirmed)

    def open(self, store: str) -> StorageHandler:
        """Return a store. Raises: DeniedError if it is unknown or unreachable; errors of its settings."""
        if store not in self._opened:
            url = self._urls.urls.get(store) or self._urls.urls.get(ANY)
            if not url:
                raise DeniedError(f"the address of store '{store}' is unknown", hint="set the option 'store'")
            self._opened[store] = self._open(store, url)
        return self._opened[store]

    def open_here(self, store: str) -> StorageHandler | None:
        """Return a store; None if it can't be opened here."""
        try:
            return self.open(store)
        except MemqError:
            return None

    async def close(self) -> None:
        """Close the opened stores."""
        for handler in self._opened.values():
            await handler.close()
        self._opened.clear()

    def _open(self, name: str, url: str) -> StorageHandler:
        scheme = urlsplit(url).scheme
        if scheme == "file":
            root = Path(url2pathname(urlsplit(url).path))
            if not root.is_dir():
                if name == ANY:
                    hint = "check the name, and let all machines share the folder"
                    raise DeniedError(f"the folder '{root}' is not on this machine", hint=hint)
                raise DeniedError(
                    f"store '{name}' is the folder '{root}', which is not on this machine",
                    hint="let all machines share the folder, or set the option 'store'",
                )
            return FilesystemHandler(root, root, _THREADS_MAX, shared=True)
        if scheme == "s3":
            from memq.storage_handlers.s3 import check_trust, open_store  # it takes its time

            parts = environment_settings({}, self._urls.config, self._urls.profile).parts()
            if url != self._urls.urls.get(ANY):  # it is not from the option 'store'
                check_trust(url, parts.section("s3"), own_endpoints(self._urls.config, self._urls.profile))
            return open_store(url, self._runtime, parts.section("s3"))
        raise InvalidSettingError(
            f"store '{name}' at '{url[:120]}' can't be opened by tasks", hint="use file:/FOLDER or s3://BUCKET/PREFIX"
        )


async def _no_broker(store: str, key: str, offset: int, length: int) -> Buffer:
    """Refuse a read through a broker, which tasks do not have. Raises: DeniedError."""
    raise DeniedError(f"store '{store}' can't be read through a broker by a task of Spark")

"""Opens the cluster's stores in the client's process, where their address can be opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from memq.client.consumer.fetch.fetcher import RangeReader
from memq.client.metadata import ClusterMetadata
from memq.errors import InvalidSettingError, MemqError, UnknownSettingError, UntrustedStoreError
from memq.format.blocks.header import Buffer
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.waits import Waits
from memq.settings import Section, environment_settings
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.filesystem import FilesystemHandler

_THREADS_MAX = 4
# A broker can read for us: a store that can't be reached from here must not hold a reader up for half a minute.
_S3_TIMES: Section = {
    name: (value, "the client")
    for name, value in {"connect_timeout_ms": 2_000, "request_timeout_ms": 5_000, "deadline_ms": 6_000}.items()
}


class OpenStores:
    """The stores that metadata names, opened on demand: local folders, and buckets with keys.

    `s3` has the section `[s3]`; without it that of this process: `MEMQ_S3_…` and memq.toml in its folder.
    `patient`: requests may take as long as those of a broker, because no other way exists. With it, or `required`, an
    endpoint that only a broker names is an error. Else such a store is not opened, and an event says so.
    """

    def __init__(
        self,
        metadata: ClusterMetadata,
        runtime: Runtime,
        s3: Mapping[str, object] | None = None,
        *,
        patient: bool = False,
        required: bool = False,
    ) -> None:
        self._s3 = s3
        self._required = patient or required
        self._events = EventLog(runtime.clock)
        self._times = {} if patient else _S3_TIMES
        self._metadata = metadata
        self._runtime = runtime
        self._opened: dict[str, StorageHandler] = {}

    def __call__(self, store: str) -> StorageHandler | None:
        """Return a reader of the store; None when there is no way to it. Raises: UntrustedStoreError."""
        if store in self._opened:
            return self._opened[store]
        for known in self._metadata.stores:
            try:
                handler = self._open(known.url) if known.name == store else None
            except UntrustedStoreError as error:
                if self._required:
                    raise
                self._events.warning("client.store-untrusted", f"{error}; brokers read for this client; {error.hint}")
                return None
            if handler is not None:
                self._opened[store] = handler
                return handler
        return None

    def _open(self, url: str) -> StorageHandler | None:
        match urlsplit(url).scheme:
            case "file":
                return _open_folder(url)
            case "s3":
                return _open_bucket(url, self._runtime, self._s3, self._times)
        return None

    def reader(self, store: str, waits: Waits) -> RangeReader | None:
        """Return a reader whose answers are noted in `waits`; None if the store can't be opened here."""
        handler = self(store)
        return None if handler is None else _WatchedReader(handler, f"store '{store}' at {handler.url}", waits)

    async def close(self) -> None:
        """End the threads and connections of the opened stores."""
        for handler in self._opened.values():
            await handler.close()
        self._opened.clear()


class _WatchedReader:
    """Reads a store, and notes what it owes."""

    def __init__(self, store: StorageHandler, location: str, waits: Waits) -> None:
        self._store, self._location, self._waits = store, location, waits

    async def get_range(self, key: str, offset: int, length: int) -> Buffer:
        with self._waits.on(self._location, f"object '{key}'"):
            return await self._store.get_range(key, offset, length)


def check_s3(s3: Mapping[str, object] | None) -> None:
    """Refuse settings of `[s3]` that do not exist or do not hold, before a store is opened with them.

    Without the extra `[s3]` the settings are not known here, and no bucket is opened.
    Raises: TypeError, InvalidSettingError, UnknownSettingError.
    """
    if s3 is None:
        return
    if not isinstance(s3, Mapping):
        raise TypeError(f"s3 must be a mapping of settings, not {type(s3).__name__}")
    for name in s3:
        if not isinstance(name, str):
            raise TypeError(f"the name of a setting in s3 must be str, not {type(name).__name__}")
    with suppress(ModuleNotFoundError):
        from memq.storage_handlers.s3.settings import read_bucket

        read_bucket("s3://bucket", _section_of(s3, _S3_TIMES))


def _section_of(s3: Mapping[str, object], times: Section) -> Section:
    return _with_times({name: (value, "s3=…") for name, value in s3.items()}, times)


def _open_folder(url: str) -> StorageHandler | None:
    """Return a store of files; None when its folder is not on this machine, or this user may not read it."""
    parts = urlsplit(url)
    root = Path(url2pathname(parts.path))
    if parts.netloc or not os.access(root, os.R_OK | os.X_OK) or not root.is_dir():
        return None
    return FilesystemHandler(root, root, _THREADS_MAX, shared=True)  # its broker writes there, too


def _open_bucket(url: str, runtime: Runtime, s3: Mapping[str, object] | None, times: Section) -> StorageHandler | None:
    """Return a store in S3; None when the extra or the keys are missing here.

    Raises: InvalidSettingError, UnknownSettingError for the content of `s3`.
    """
    from memq.storage_handlers.s3 import check_trust, open_store  # it takes its time, and few need it

    try:
        if s3 is None:
            section = _with_times(environment_settings({}, None, None).parts().section("s3"), times)
        else:
            section = _section_of(s3, times)
        check_trust(url, section, own_endpoints())
        return open_store(url, runtime, section)
    except UntrustedStoreError:
        raise
    except (InvalidSettingError, UnknownSettingError):
        if s3 is not None:
            raise
    except MemqError:
        pass
    return None


def own_endpoints(config: str | None = None, profile: str | None = None) -> list[str]:
    """Return the stores and endpoints that this process's configuration names, some of them with commas."""
    named = [os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")]
    with suppress(MemqError):  # a configuration with a mistake names none
        parts = environment_settings({}, config, profile).parts()
        section = parts.section("s3")
        named.append(parts.store)
        named += [str(section[name][0]) for name in ("endpoint", "trusted_endpoints") if name in section]
    return named


def _with_times(section: Section, times: Section) -> Section:
    """Return a section with these times, unless it names times of its own."""
    return section if section.keys() & times.keys() else {**times, **section}

"""Objects in memory, for tests, the simulation and `memq.testing`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, NotFoundError, ObjectExistsError
from memq.runtime.clock import Clock
from memq.storage_handlers import Buffer, ObjectEntry, check_key, check_prefix, check_size


class MemoryHandler:
    """Keeps objects in a dictionary, until they are deleted.

    All users of this instance see the same objects. Calls use no thread and never wait. `objects` is the store itself,
    key to bytes, and `modified_ms` has the times (Unix ms) of its objects: tests read and damage both.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.modified_ms: dict[str, int] = {}
        self.objects: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        """See `StorageHandler.url`."""
        return "memory:"

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        """See `ObjectWriter.put`. The bytes are copied."""
        check_key(key)
        body = b"".join(buffers)
        found = crc32c(body)
        if found != checksum:
            raise CorruptDataError(f"object '{key}' not stored: its bytes have crc32c {found:08x}, not {checksum:08x}")
        if self.objects.setdefault(key, body) != body:
            raise ObjectExistsError(f"another object of {len(self.objects[key])} bytes has the key '{key}'")
        self.modified_ms.setdefault(key, self._clock.wall_ms())

    async def delete(self, key: str) -> None:
        """See `ObjectWriter.delete`."""
        self.objects.pop(check_key(key), None)
        self.modified_ms.pop(key, None)

    async def get(self, key: str, *, checked: bool = True) -> bytes:
        """See `ObjectReader.get`. There are no checksums."""
        body = self._found(key)
        check_size(key, len(body))
        return body

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `ObjectReader.get_range`."""
        body = self._found(key)
        if offset + length > len(body):
            raise CorruptDataError(f"object '{key}' has {len(body)} bytes, asked for {length} from {offset}")
        return body[offset : offset + length]

    async def size(self, key: str) -> int:
        """See `ObjectReader.size`."""
        return len(self._found(key))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
        """See `ObjectReader.list`. Yields the objects that exist at the first step."""
        check_prefix(prefix)
        keys = sorted(key for key in self.objects if key.startswith(prefix))
        for entry in [ObjectEntry(key, len(self.objects[key]), self.modified_ms[key]) for key in keys]:
            yield entry

    async def check(self, *, deletes: bool = True) -> None:
        """See `StorageHandler.check`: memory is always available."""

    async def close(self) -> None:
        """See `StorageHandler.close`: does nothing, because other users may share this store."""

    def _found(self, key: str) -> bytes:
        body = self.objects.get(check_key(key))
        if body is None:
            raise NotFoundError(f"object '{key}' does not exist")
        return body

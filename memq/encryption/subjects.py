"""Keys of subjects, such as persons, in a file. Without its key a record is unreadable.

The file has a head with one wrapped store key, and a slot for each subject: the wrapped key of the subject, and a
keyed hash of its name. To forget a subject is to overwrite its slot in place. docs/formats.md has the layout.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from memq.encryption.cipher import Cipher, new_key
from memq.encryption.keys import KeyProvider, sync_parent
from memq.errors import CorruptDataError, KeyMissingError, KeyProviderError, NotFoundError
from memq.format.subject_keys import (
    FORGETS_AT,
    KEY_ID_BYTES,
    SLOT,
    SLOTS_AT,
    Slot,
    decode_head,
    decode_slots,
    encode_forgotten,
    encode_head,
    encode_slot,
)
from memq.runtime.private_files import FILE_MODE

_WRAP = b"mqW1"  # begins the associated data of a wrapped key of a subject
_READS_MAX = 3
_BACKUP = "restore a backup of the file"


class SubjectKeys:
    """The keys of subjects in a file. Threads and processes of one machine may share it.

    Raises: KeyProviderError if the file can't be used now; KeyMissingError.
    """

    def __init__(self, path: Path, provider: KeyProvider) -> None:
        self._path = path
        self._provider = provider
        self._lock = threading.Lock()
        self._store: Cipher | None = None
        self._hash_key = b""
        self._by_id: dict[bytes, Slot] = {}
        self._by_subject: dict[bytes, Slot] = {}
        self._seen = (0, 0)  # the number of forgets and of slots that were read

    def key_for(self, subject: str) -> tuple[bytes, Cipher]:
        """Return key id and key of a subject; a new subject gets a key, which is durable then."""
        with self._lock:
            try:
                found = self._find(subject) if self._has_head() else None
                if found is None:
                    with self._writing() as file:
                        found = self._find(subject) or self._append(file, subject)
            except OSError as error:
                raise self._failed(error) from error
            return found.key_id, self._opened(found)

    def key(self, key_id: bytes) -> Cipher | None:
        """Return a key by its id; None for a subject that was forgotten. Raises: KeyMissingError."""
        with self._lock:
            try:
                self._refresh()
            except OSError as error:
                raise self._failed(error) from error
            slot = self._by_id.get(key_id)
            if slot is None:
                raise KeyMissingError(
                    f"the key {key_id.hex()} of a subject is not in '{self._path}'",
                    hint="pass the file of the writers as subjects= (--subjects)",
                )
            return self._opened(slot) if slot.wrapped else None

    def forget(self, subject: str) -> str:
        """Destroy the key of a subject, and return its id in hex. It is durable then.

        Raises: NotFoundError for a subject without a key, or one that was forgotten.
        """
        with self._lock:
            try:
                with self._writing() as file:
                    slot = self._find(subject)
                    if slot is None:
                        raise NotFoundError(
                            f"subject '{subject[:60]}' has no key in '{self._path}'",
                            hint="it was forgotten before, or no record names it",
                        )
                    _put(file, SLOTS_AT + SLOT.size * slot.number, encode_forgotten(slot.key_id))
                    _put(file, FORGETS_AT, (self._seen[0] + 1).to_bytes(8, "little"))
                    self._refresh()
            except OSError as error:
                raise self._failed(error) from error
            return slot.key_id.hex()

    def _has_head(self) -> bool:
        return self._path.exists() and self._path.stat().st_size >= SLOTS_AT

    def _find(self, subject: str) -> Slot | None:
        self._refresh()
        return self._by_subject.get(self._hash(subject))

    def _hash(self, subject: str) -> bytes:
        return hmac.digest(self._hash_key, subject.encode(), hashlib.sha256)

    def _opened(self, slot: Slot) -> Cipher:
        assert self._store is not None, "the head was read"
        plain = self._store.unwrap(slot.wrapped, _WRAP + slot.key_id)
        if plain is None:
            raise self._damaged(CorruptDataError(f"key {slot.key_id.hex()} does not fit the file's own key"))
        return Cipher(plain)

    def _append(self, file: IO[bytes], subject: str) -> Slot:
        assert self._store is not None, "the head was read"
        number, key_id = self._seen[1], new_key()[:KEY_ID_BYTES]
        slot = Slot(number, key_id, self._hash(subject), self._store.wrap(new_key(), _WRAP + key_id))
        _put(file, SLOTS_AT + SLOT.size * number, encode_slot(*slot[1:]))
        self._refresh()
        return slot

    @contextmanager
    def _writing(self) -> Iterator[IO[bytes]]:
        """Lock the file against other writers; create it if it does not exist."""
        import fcntl  # not on Windows, where only readers use the file

        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, FILE_MODE)
        with os.fdopen(handle, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(handle).st_size < SLOTS_AT:
                self._write_head(file)
            self._refresh()
            yield file

    def _write_head(self, file: IO[bytes]) -> None:
        """Write the head, and the bytes up to the slots: a file without all of them has no slot yet."""
        made = self._provider.new_data_key()
        file.truncate(0)
        _put(file, 0, encode_head(made.key_id, made.wrapped))
        sync_parent(self._path)

    def _refresh(self) -> None:
        """Read new slots; all of them if a subject was forgotten since."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError as error:
            raise KeyMissingError(f"the file '{self._path}' with the keys of subjects does not exist") from error
        with file:
            head = file.read(SLOTS_AT)
            if len(head) < SLOTS_AT:
                raise KeyProviderError(f"the file '{self._path}' is being created")
            if self._store is None:
                self._read_head(head)
            forgets, (seen, number) = int.from_bytes(head[FORGETS_AT:], "little"), self._seen
            if forgets != seen:
                number = 0
            for slot in self._slots(file, number):
                self._take(slot)
                number += 1
            self._seen = forgets, number

    def _slots(self, file: IO[bytes], number: int) -> list[Slot]:
        """Read the slots from a number on. A slot that is being overwritten is read again."""
        for tries_left in reversed(range(_READS_MAX)):
            file.seek(SLOTS_AT + SLOT.size * number)
            try:
                return decode_slots(file.read(), number)
            except CorruptDataError as error:
                if not tries_left:
                    raise self._damaged(error) from error
        raise AssertionError("the last try returns or raises")

    def _read_head(self, head: bytes) -> None:
        try:
            name, wrapped = decode_head(head)
        except CorruptDataError as error:
            raise self._damaged(error) from error
        plain = self._provider.unwrap(name, wrapped)
        self._store, self._hash_key = Cipher(plain), hmac.digest(plain, b"names of subjects", hashlib.sha256)

    def _take(self, slot: Slot) -> None:
        before = self._by_id.get(slot.key_id)
        if before is not None:
            self._by_subject.pop(before.subject, None)
        self._by_id[slot.key_id] = slot
        if slot.wrapped:
            self._by_subject[slot.subject] = slot

    def _damaged(self, error: CorruptDataError) -> KeyMissingError:
        """A missing key, and no damage of a block: no reader may pass over its records."""
        return KeyMissingError(f"the file '{self._path}' with the keys of subjects: {error}", hint=_BACKUP)

    def _failed(self, error: OSError) -> KeyProviderError:
        return KeyProviderError(f"the file '{self._path}' with the keys of subjects fails: {error.strerror}")


def _put(file: IO[bytes], at: int, data: bytes) -> None:
    """Write bytes in place; they are durable then."""
    file.seek(at)
    file.write(data)
    os.fsync(file.fileno())

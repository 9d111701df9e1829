"""Key providers: the protocol, and keys of this machine in a file or in a variable."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from memq.encryption.cipher import KEY_BYTES, Cipher, new_key
from memq.errors import AlreadyExistsError, InvalidSettingError, KeyMissingError, KeyProviderError
from memq.limits import ENVELOPE_KEY_ID_BYTES_MAX
from memq.runtime.private_files import FILE_MODE
from memq.topic import check_name

VERSION = 1
_WRAP = b"mqK1"  # begins the associated data of a wrapped data key


@dataclass(frozen=True, slots=True)
class DataKey:
    """A key for content: plain, and wrapped by the provider's key `key_id`."""

    key_id: str
    plain: bytes = field(repr=False)
    wrapped: bytes


class KeyProvider(Protocol):
    """Keeps the keys that wrap data keys. Its functions may block, and are called from any thread.

    Raises: KeyMissingError for a key that it does not have or that does not fit; KeyProviderError if it may work later.
    """

    def new_data_key(self) -> DataKey:
        """Return a new data key, wrapped by the current key."""
        ...

    def unwrap(self, key_id: str, wrapped: bytes) -> bytes:
        """Return the plain data key."""
        ...


class LocalKeys:
    """A `KeyProvider` over keys of this process; `read` returns the current key id and all keys.

    An unknown key id makes it read again, so that a rotation needs no restart.
    """

    def __init__(self, read: Callable[[], tuple[str, Mapping[str, bytes]]], name: str) -> None:
        self._read = read
        self._name = name
        self._current, self._keys = read()

    def new_data_key(self) -> DataKey:
        """See `KeyProvider`."""
        self._current, self._keys = self._read()
        plain = new_key()
        return DataKey(self._current, plain, Cipher(self._keys[self._current]).wrap(plain, _context(self._current)))

    def unwrap(self, key_id: str, wrapped: bytes) -> bytes:
        """See `KeyProvider`."""
        if key_id not in self._keys:
            self._current, self._keys = self._read()
        key = self._keys.get(key_id)
        if key is None:
            raise KeyMissingError(f"key {key_id[:60]!a} is not in {self._name}")
        plain = Cipher(key).unwrap(wrapped, _context(key_id))
        if plain is None:
            raise KeyMissingError(
                f"key {key_id[:60]!a} of {self._name} does not open a data key: the block's writer had another key "
                "of this id, or the block was changed"
            )
        return plain


def _context(key_id: str) -> bytes:
    return _WRAP + key_id.encode()


def file_keys(path: Path) -> LocalKeys:
    """Return the keys of a file. Raises: InvalidSettingError, KeyProviderError."""
    return LocalKeys(lambda: _read_file(path), f"the key file '{path}'")


def environment_keys(variable: str, environment: Mapping[str, str] = os.environ) -> LocalKeys:
    """Return the keys of a variable: `ID:KEY[,ID:KEY…]`, the current one first; in base64.

    Raises: InvalidSettingError.
    """

    def read() -> tuple[str, Mapping[str, bytes]]:
        text = environment.get(variable, "")
        if not text:
            raise InvalidSettingError(f"the variable {variable} of the keys is not set", hint="set it to ID:KEY")
        pairs = [part.strip().partition(":") for part in text.split(",")]
        keys = {_key_id(name): _key(key, name) for name, _, key in pairs}
        return pairs[0][0], keys

    return LocalKeys(read, f"the variable {variable}")


def create_key_file(path: Path, key_id: str) -> None:
    """Write a key file with one new key. Raises: AlreadyExistsError, InvalidSettingError."""
    if path.exists():
        raise AlreadyExistsError(f"'{path}' exists", hint="memq keys rotate adds a key to it")
    _write_file(path, _key_id(key_id), {key_id: new_key()})


def rotate_key_file(path: Path, key_id: str) -> None:
    """Add a new key to a file, which encrypts from now on; the others stay. Raises: as `file_keys`."""
    _, keys = _read_file(path)
    if key_id in keys:
        raise AlreadyExistsError(f"the key file '{path}' has a key '{key_id}'", hint="choose another id")
    _write_file(path, _key_id(key_id), {**keys, key_id: new_key()})


def key_ids(path: Path) -> tuple[str, list[str]]:
    """Return the current key id of a file, and all ids. Raises: as `file_keys`."""
    current, keys = _read_file(path)
    return current, list(keys)


def _read_file(path: Path) -> tuple[str, Mapping[str, bytes]]:
    try:
        if path.stat().st_mode & 0o077:
            raise InvalidSettingError(f"others can read the key file '{path}'", hint=f"chmod 600 '{path}'")
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidSettingError(
            f"the key file '{path}' does not exist", hint=f"make one: memq keys init '{path}'"
        ) from error
    except OSError as error:
        raise KeyProviderError(f"the key file '{path}' can't be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidSettingError(f"the key file '{path}' is no JSON") from error
    if not isinstance(found, dict) or found.get("version") != VERSION or not isinstance(found.get("keys"), dict):
        raise InvalidSettingError(f"the key file '{path}' has no version {VERSION} with keys")
    keys = {_key_id(name): _key(key, name) for name, key in found["keys"].items()}
    current = found.get("current")
    if current not in keys:
        raise InvalidSettingError(f"the key file '{path}' has no key of the id in 'current'")
    return current, keys


def _write_file(path: Path, current: str, keys: Mapping[str, bytes]) -> None:
    """Replace the file at once: it has the old or the new keys, also after a loss of power."""
    content = {
        "version": VERSION,
        "current": current,
        "keys": {name: base64.b64encode(key).decode() for name, key in keys.items()},
    }
    made = path.with_name(f"{path.name}.new")
    handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
    except OSError as error:
        raise KeyProviderError(f"the key file '{path}' can't be written: {error.strerror}") from error
    sync_parent(path)


def sync_parent(path: Path) -> None:
    """Make the name of a file durable."""
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _key_id(name: str) -> str:
    check_name(name, "key id")
    if len(name.encode()) > ENVELOPE_KEY_ID_BYTES_MAX:
        raise InvalidSettingError(f"key id '{name[:60]}' is over {ENVELOPE_KEY_ID_BYTES_MAX} bytes")
    return name


def _key(text: object, name: str) -> bytes:
    """Return a key from base64. Raises: InvalidSettingError, without the text."""
    try:
        key = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidSettingError(
            f"key '{name[:60]}' is not {KEY_BYTES} bytes in base64",
            hint=f"make one: head -c {KEY_BYTES} /dev/urandom | base64",
        )
    return key

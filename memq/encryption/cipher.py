"""AES-256-GCM, by the library `cryptography`: the only module that encrypts content."""

from __future__ import annotations

from memq.errors import InvalidSettingError
from memq.format.blocks.envelope import NONCE_BYTES
from memq.format.blocks.header import Buffer

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError as missing:
    raise InvalidSettingError(
        "encryption needs the package cryptography", hint="pip install 'memq[encryption]'"
    ) from missing

KEY_BYTES = 32
WRAPPED_BYTES = NONCE_BYTES + KEY_BYTES + 16  # of a key that another key wraps


def new_key() -> bytes:
    """Return a new key, by the system's random source."""
    return AESGCM.generate_key(bit_length=8 * KEY_BYTES)


def new_nonce() -> bytes:
    """Return a new nonce, by the system's random source: processes that were forked draw different ones."""
    return new_key()[:NONCE_BYTES]


class Cipher:
    """One key. Threads may share it."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES, f"key of {len(key)} bytes"
        self._key = AESGCM(key)

    def seal(self, nonce: bytes, data: Buffer, associated_data: bytes) -> bytes:
        """Return the encrypted data with its tag; a nonce is used once."""
        return self._key.encrypt(nonce, data, associated_data)

    def open(self, nonce: bytes, sealed: Buffer, associated_data: bytes) -> bytes | None:
        """Return the data; None if the tag does not fit: another key, other associated data, or changed bytes."""
        try:
            return self._key.decrypt(nonce, sealed, associated_data)
        except InvalidTag:
            return None

    def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        """Return another key, encrypted: nonce, key and tag."""
        nonce = new_nonce()
        return nonce + self.seal(nonce, key, associated_data)

    def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes | None:
        """Return a wrapped key; None if it does not fit this key."""
        if len(wrapped) != WRAPPED_BYTES:
            return None
        return self.open(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], associated_data)

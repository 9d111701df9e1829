"""`Encryption`: the keys of a client, with which producers seal blocks and consumers open them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from memq.encryption.cipher import Cipher, new_nonce
from memq.encryption.keys import DataKey, KeyProvider
from memq.encryption.providers import provider_of
from memq.encryption.records import open_records, seal_record
from memq.encryption.subjects import SubjectKeys
from memq.errors import CorruptDataError, InvalidSettingError, MemqError, NotEncryptedError, RetryableError
from memq.format.batch import BlockPiece
from memq.format.blocks.builder import Headers, SealedBlock
from memq.format.blocks.columns import BlockReader
from memq.format.blocks.envelope import (
    SUBJECTS,
    Envelope,
    associated_data,
    begin_envelope,
    encode_envelope_head,
    open_envelope,
    parse_envelope,
)
from memq.format.blocks.header import ENVELOPE
from memq.runtime.clock import Clock, SystemClock

PlainBlocks = Literal["refuse", "allow"]
BLOCKS_MAX = 1 << 20  # with one data key: the chance that two of its random nonces of 96 bits are equal is below 2^-56
KEY_S_MAX = 3_600.0
CACHED_MAX = 1_024


class _Known(NamedTuple):
    cipher: Cipher
    until_s: float


class Encryption:
    """The keys of producers and consumers. Threads may share it.

    Args:
        keys: `file:PATH`, `env:VARIABLE`, `aws-kms:KEY`, or a provider of your own (`memq.encryption.keys`).
        subjects: the file with the keys of subjects; it is created with the first one. None: no subjects.
        plain_blocks: for a consumer that meets a block without encryption. "refuse": NotEncryptedError, since brokers
            and writers without keys can make such blocks; "allow": read them, as in a topic that was plain before.
        data_key_blocks_max, data_key_s_max: bounds on the use of one data key by a producer.
        clock: of the age of data keys.

    Raises: InvalidSettingError.
    """

    def __init__(
        self,
        keys: str | KeyProvider,
        *,
        subjects: str | os.PathLike[str] | None = None,
        plain_blocks: PlainBlocks = "refuse",
        data_key_blocks_max: int = BLOCKS_MAX,
        data_key_s_max: float = KEY_S_MAX,
        clock: Clock | None = None,
    ) -> None:
        if not 0 < data_key_blocks_max <= BLOCKS_MAX:
            raise InvalidSettingError(f"data_key_blocks_max = {data_key_blocks_max} is outside 1 to {BLOCKS_MAX}")
        if plain_blocks not in ("refuse", "allow"):
            raise InvalidSettingError(f"plain_blocks = {plain_blocks!r} is not 'refuse' or 'allow'")
        self.allows_plain = plain_blocks == "allow"
        self._provider = provider_of(keys) if isinstance(keys, str) else keys
        self._subjects = SubjectKeys(Path(subjects), self._provider) if subjects is not None else None
        self._blocks_max, self._key_s_max = data_key_blocks_max, data_key_s_max
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._data_key: tuple[DataKey, Cipher] | None = None
        self._blocks, self._key_until_s = 0, 0.0
        self._known: OrderedDict[tuple[str, bytes], _Known] = OrderedDict()
        self._has_subjects = False

    def check_subjects(self) -> None:
        """Raises: InvalidSettingError without a file for the keys of subjects."""
        _ = self.subjects

    @property
    def subjects(self) -> SubjectKeys:
        """The keys of subjects. Raises: InvalidSettingError without a file for them."""
        if self._subjects is None:
            raise InvalidSettingError(
                "records with subjects need the file with their keys", hint="pass subjects= (--subjects)"
            )
        return self._subjects

    def seal_content(self, value: bytes | None, headers: Headers, topic_id: str) -> tuple[bytes | None, Headers]:
        """Return value and headers of a record as its block holds them. Raises: as `seal_record`."""
        stored = seal_record(value, headers, bytes.fromhex(topic_id), self.subjects)
        self._has_subjects = True
        return stored

    def seal_block(self, block: SealedBlock, topic_id: str, partition: int) -> SealedBlock:
        """Return a block in its envelope. Raises: KeyMissingError, KeyProviderError, TooLargeError."""
        key, cipher = self._current()
        nonce, flags = new_nonce(), SUBJECTS if self._has_subjects else 0
        head = encode_envelope_head(block.header.codec, flags, nonce, key.key_id, key.wrapped)
        begun = begin_envelope(block, bytes.fromhex(topic_id), partition, head)
        return begun.finish(cipher.seal(nonce, begun.payload, begun.associated_data))

    def _current(self) -> tuple[DataKey, Cipher]:
        with self._lock:
            now_s = self._clock.monotonic()
            if self._data_key is None or self._blocks >= self._blocks_max or now_s >= self._key_until_s:
                made = self._provider.new_data_key()
                self._data_key = made, Cipher(made.plain)
                self._blocks, self._key_until_s = 0, now_s + self._key_s_max
            self._blocks += 1
            return self._data_key

    def needs_wait(self, pieces: Sequence[BlockPiece]) -> bool:
        """Whether `open_pieces` may block: a data key is unknown, or the keys of subjects must be read."""
        for piece in pieces:
            if piece.header is not None and piece.header.codec == ENVELOPE:
                try:
                    envelope = parse_envelope(piece.data, piece.header)
                except MemqError:
                    continue
                known = self._known.get((envelope.key_id, envelope.wrapped_key))
                if known is None or envelope.flags & SUBJECTS or self._clock.monotonic() >= known.until_s:
                    return True
        return False

    def open_pieces(self, pieces: Sequence[BlockPiece], topic_id: str, partition: int) -> list[BlockPiece]:
        """Return the blocks of a batch in plain. One that can't be opened has the error as its cause.

        The checksum in a header stays that of the stored block, by which copies are known.
        Raises: KeyProviderError: try again.
        """
        opened = []
        for piece in pieces:
            if piece.header is not None and (piece.header.codec == ENVELOPE or not self.allows_plain):
                try:
                    piece = self._opened(piece, bytes.fromhex(topic_id), partition)
                except RetryableError:
                    raise
                except MemqError as error:
                    piece = piece._replace(header=None, cause=error)
            opened.append(piece)
        return opened

    def _opened(self, piece: BlockPiece, topic_id: bytes, partition: int) -> BlockPiece:
        stored = piece.sound()
        if stored.codec != ENVELOPE:
            raise NotEncryptedError(f"{stored.describe()} is not encrypted")
        envelope = parse_envelope(piece.data, stored)
        payload = self._cipher(envelope).open(
            envelope.nonce, envelope.sealed, associated_data(piece.data, envelope, topic_id, partition)
        )
        if payload is None:
            raise CorruptDataError(
                f"{stored.describe()}: its tag does not fit: the block was changed, or is of another place",
                hint="a writer of the bucket or the topic may have changed it; run memq trace",
            )
        header, data = open_envelope(stored, envelope, payload)
        if envelope.flags & SUBJECTS:
            plain = open_records(BlockReader(data, header), topic_id, self.subjects)
            header, data = plain if plain is not None else (header, data)
        return piece._replace(header=header._replace(checksum=stored.checksum), data=memoryview(data))

    def _cipher(self, envelope: Envelope) -> Cipher:
        """Return the data key of an envelope, from the cache or from the provider."""
        name, now_s = (envelope.key_id, envelope.wrapped_key), self._clock.monotonic()
        with self._lock:
            known = self._known.get(name)
            if known is not None and now_s < known.until_s:
                return known.cipher
        made = Cipher(self._provider.unwrap(*name))
        with self._lock:
            self._known[name] = _Known(made, now_s + self._key_s_max)
            if len(self._known) > CACHED_MAX:
                self._known.popitem(last=False)
        return made

"""Envelopes, key providers and keys of subjects: what opens a block, and what each changed byte does."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import pytest

from memq.encryption import keys as key_files
from memq.encryption.encryption import Encryption
from memq.encryption.keys import environment_keys, file_keys
from memq.encryption.providers import provider_of
from memq.encryption.subjects import SubjectKeys
from memq.errors import (
    AlreadyExistsError,
    CorruptDataError,
    InvalidSettingError,
    KeyMissingError,
    MemqError,
    NotFoundError,
    TooLargeError,
)
from memq.format.batch import BlockPiece
from memq.format.blocks.builder import BlockBuilder, SealedBlock
from memq.format.blocks.columns import BlockReader, open_block, verify_block
from memq.format.blocks.envelope import FORGOTTEN, SUBJECT, SUBJECT_KEY
from memq.format.blocks.header import ENVELOPE, check_block, scope_of
from memq.format.subject_keys import SLOT, SLOTS_AT
from memq.limits import BLOCK_HEADER_BYTES, BLOCK_RAW_BYTES_MAX
from tests.golden.make import FOLDER, MASTER_KEY, NOW_MS, SUBJECT_KEY_ID, TOPIC_ID, full_builder, seal

OTHER_TOPIC = "ff" * 16
SCOPE = scope_of(bytes.fromhex(TOPIC_ID), 3)


def keys_of(**keys: bytes) -> str:
    return ",".join(f"{name}:{b64encode(key).decode()}" for name, key in keys.items())


def encryption(path: Path | None = None, **keys: bytes) -> Encryption:
    found = {"KEYS": keys_of(**(keys or {"k1": MASTER_KEY}))}
    return Encryption(environment_keys("KEYS", found), subjects=path)


def piece_of(data: bytes | bytearray | memoryview) -> BlockPiece:
    header = check_block(data)
    return BlockPiece(0, 0, header.count, header, memoryview(data))


def opened(
    reader: Encryption, data: bytes | bytearray | memoryview, topic: str = TOPIC_ID, partition: int = 3
) -> BlockPiece:
    (found,) = reader.open_pieces([piece_of(data)], topic, partition)
    return found


def cause_of(piece: BlockPiece) -> MemqError:
    assert piece.header is None
    assert piece.cause is not None
    return piece.cause


def checked_again(data: bytes) -> bytes:
    """A stranger gives a changed block a right checksum."""
    from awscrt.checksums import crc32c

    checksum: int = crc32c(data[8:])
    return data[:4] + checksum.to_bytes(4, "little") + data[8:]


@pytest.mark.parametrize("codec", ["none", "zstd", "lz4"])
def test_an_opened_block_has_the_records_and_the_identity_of_the_plain_one(codec: str) -> None:
    plain = seal(full_builder(), codec, 42, 100)
    stored = encryption().seal_block(plain, TOPIC_ID, 3)
    assert stored.header.codec == ENVELOPE
    assert b"second" not in stored.data
    found = opened(encryption(), stored.data)
    assert found.header is not None
    assert list(found.reader().records()) == list(BlockReader(plain.data).records())
    assert found.header.checksum == stored.header.checksum, "copies are known by the stored checksum"
    verify_block(open_block(found.data))
    assert found.header[7:] == plain.header[7:] == stored.header[7:], "scope, identity, times, slots and tag bits"


def test_a_block_has_no_place_but_its_own() -> None:
    stored = encryption().seal_block(seal(full_builder(), "zstd", 42, 100), TOPIC_ID, 3)
    assert isinstance(cause_of(opened(encryption(), stored.data, topic=OTHER_TOPIC)), CorruptDataError)
    assert isinstance(cause_of(opened(encryption(), stored.data, partition=4)), CorruptDataError)


@pytest.mark.parametrize("at", range(10, BLOCK_HEADER_BYTES))
def test_each_byte_of_the_header_is_protected(at: int) -> None:
    stored = bytes(encryption().seal_block(seal(full_builder(), "none", 42, 100), TOPIC_ID, 3).data)
    changed = checked_again(stored[:at] + bytes((stored[at] ^ 1,)) + stored[at + 1 :])
    try:
        piece = piece_of(changed)
    except MemqError:
        return
    assert isinstance(cause_of(opened(encryption(), changed)), MemqError), piece.header


def test_each_byte_of_the_envelope_is_protected() -> None:
    stored = bytes(encryption().seal_block(seal(full_builder(), "none", 42, 100), TOPIC_ID, 3).data)
    for at in range(BLOCK_HEADER_BYTES, len(stored)):
        changed = checked_again(stored[:at] + bytes((stored[at] ^ 0x40,)) + stored[at + 1 :])
        cause_of(opened(encryption(), changed))


def test_changed_content_is_damage_and_a_missing_or_wrong_key_is_none() -> None:
    stored = bytes(encryption().seal_block(seal(full_builder(), "none", 42, 100), TOPIC_ID, 3).data)
    changed = checked_again(stored[:-1] + bytes((stored[-1] ^ 1,)))
    assert isinstance(cause_of(opened(encryption(), changed)), CorruptDataError)
    missing, wrong = encryption(k2=MASTER_KEY), encryption(k1=bytes(32))
    assert isinstance(cause_of(opened(missing, stored)), KeyMissingError)
    assert "another key" in str(cause_of(opened(wrong, stored)))
    assert isinstance(cause_of(opened(wrong, stored)), KeyMissingError)
    with pytest.raises(KeyMissingError, match="'k1'"):
        list(open_block(stored).records())
    verify_block(open_block(stored))  # an audit without keys checks the envelope


def test_the_golden_block_opens_with_its_keys() -> None:
    reader = encryption(FOLDER / "subject-keys.bin", golden=MASTER_KEY)
    found = opened(reader, (FOLDER / "block-encrypted.bin").read_bytes())
    *rest, (value, key, headers, _, _) = list(found.reader().records())
    assert rest == list(BlockReader(seal(full_builder(), "none", 42, 100).data).records())
    assert (value, key) == (b"personal", b"key")
    assert headers == (("name", b"Ada"), (SUBJECT_KEY, SUBJECT_KEY_ID.hex().encode()))


def test_one_data_key_seals_a_bounded_number_of_blocks_each_with_its_own_nonce() -> None:
    found = {"KEYS": keys_of(k1=MASTER_KEY)}
    writer = Encryption(environment_keys("KEYS", found), data_key_blocks_max=2)
    plain = seal(full_builder(), "none", 42, 100)
    envelopes = [open_block(writer.seal_block(plain, TOPIC_ID, 3).data).envelope() for _ in range(4)]
    assert len({each.nonce for each in envelopes}) == 4
    assert [envelopes[0].wrapped_key == each.wrapped_key for each in envelopes] == [True, True, False, False]
    with pytest.raises(InvalidSettingError):
        Encryption(environment_keys("KEYS", found), data_key_blocks_max=(1 << 20) + 1)


def test_no_text_of_a_data_key_has_the_plain_key() -> None:
    made = environment_keys("KEYS", {"KEYS": keys_of(k1=MASTER_KEY)}).new_data_key()
    assert repr(made.plain)[2:-1] not in repr(made)
    assert repr(made.wrapped)[2:-1] in repr(made)


def test_a_block_without_room_for_an_envelope_is_too_large() -> None:
    builder = BlockBuilder()
    builder.append(bytes(BLOCK_RAW_BYTES_MAX - 64))
    with pytest.raises(TooLargeError, match="no room for an envelope"):
        encryption().seal_block(seal(builder, "zstd", 42, 0), TOPIC_ID, 3)


def test_a_rotation_keeps_the_former_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key_files.create_key_file(path, "one")
    assert path.stat().st_mode & 0o777 == 0o600
    writer, reader = Encryption(f"file:{path}"), Encryption(f"file:{path}")
    before = writer.seal_block(seal(full_builder(), "none", 42, 100), TOPIC_ID, 3)
    key_files.rotate_key_file(path, "two")
    assert key_files.key_ids(path) == ("two", ["one", "two"])
    after = Encryption(f"file:{path}").seal_block(seal(full_builder(), "none", 42, 100), TOPIC_ID, 3)
    assert open_block(after.data).envelope().key_id == "two"
    assert opened(reader, before.data).header is not None
    assert opened(reader, after.data).header is not None, "a reader that runs reads the file again"
    with pytest.raises(AlreadyExistsError):
        key_files.create_key_file(path, "three")
    with pytest.raises(AlreadyExistsError):
        key_files.rotate_key_file(path, "one")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no key provider"),
        ("vault:x", "no key provider"),
        ("file:/nowhere/keys.json", "memq keys init|does not exist"),
        ("env:MEMQ_TEST_NO_SUCH_VARIABLE", "is not set"),
    ],
)
def test_a_wrong_provider_is_named(text: str, match: str) -> None:
    with pytest.raises(InvalidSettingError, match=match):
        provider_of(text)


@pytest.mark.parametrize("key", ["", "AAAA", "ä", "x" * 44])
def test_a_wrong_key_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        environment_keys("KEYS", {"KEYS": f"k1:{key}"})
    assert not key or f"'{key}'" not in str(caught.value)


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key_files.create_key_file(path, "one")
    path.chmod(0o644)
    with pytest.raises(InvalidSettingError, match="others can read"):
        file_keys(path)


# ---- subjects --------------------------------------------------------------------------------


def subject_block(writer: Encryption, *subjects: str | None) -> SealedBlock:
    builder = BlockBuilder()
    for number, subject in enumerate(subjects):
        value, headers = b"value %d" % number, [("h", b"x")]
        if subject is not None:
            named = [*headers, (SUBJECT, subject.encode())]
            sealed_value, sealed_headers = writer.seal_content(value, named, TOPIC_ID)
            builder.append(sealed_value, b"key", sealed_headers, NOW_MS + number, "tag")
        else:
            builder.append(value, b"key", headers, NOW_MS + number, "tag")
    plain = builder.seal(
        producer_id=42, first_sequence=7, scope=SCOPE, now_ms=NOW_MS, codec="zstd", slot_range=(5, 60_000)
    )
    return writer.seal_block(plain, TOPIC_ID, 3)


def test_a_forgotten_subject_leaves_its_records_and_nothing_in_them(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    writer, reader = encryption(path), encryption(path)
    stored = subject_block(writer, "ada", None, "bob", "ada")
    before = opened(reader, stored.data).reader()
    assert before.values() == [b"value 0", b"value 1", b"value 2", b"value 3"]
    assert [headers[0] for headers in before.headers()] == [("h", b"x")] * 4
    key_id = encryption(path).subjects.forget("ada")
    found = opened(reader, stored.data)
    assert found.header is not None
    after = found.reader()
    assert after.values() == [None, b"value 1", b"value 2", None]
    assert after.headers()[0] == after.headers()[3] == ((FORGOTTEN, key_id.encode()),)
    assert (after.keys(), after.tags(), after.timestamps()) == (before.keys(), before.tags(), before.timestamps())
    assert found.header[7:] == stored.header[7:], "its identity, times, slots and tag bits are those of before"
    verify_block(open_block(found.data))


def test_the_key_of_a_forgotten_subject_is_in_no_byte_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    writer = encryption(path)
    subject_block(writer, "ada", "bob")
    before = path.read_bytes()
    assert b"ada" not in before
    slot = before[SLOTS_AT : SLOTS_AT + SLOT.size]
    writer.subjects.forget("ada")
    after = path.read_bytes()
    assert slot[24:116] not in after
    assert slot[56:116] not in after
    assert after[SLOTS_AT + 24 : SLOTS_AT + SLOT.size] == bytes(SLOT.size - 24)
    assert after[SLOTS_AT + SLOT.size :] == before[SLOTS_AT + SLOT.size :]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_subject_is_forgotten_once_and_gets_another_key_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    writer = encryption(path)
    stored = subject_block(writer, "ada")
    writer.subjects.forget("ada")
    with pytest.raises(NotFoundError, match="'ada'"):
        writer.subjects.forget("ada")
    with pytest.raises(NotFoundError, match="'eve'"):
        encryption(path).subjects.forget("eve")
    again = subject_block(writer, "ada")
    assert opened(writer, stored.data).reader().values() == [None]
    assert opened(writer, again.data).reader().values() == [b"value 0"]


def test_a_record_that_is_sent_again_has_the_key_of_its_subject(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    writer = encryption(path)
    ((_, headers),) = [(1, each) for each in opened(writer, subject_block(writer, "ada").data).reader().headers()]
    value, sealed = writer.seal_content(b"again", headers, OTHER_TOPIC)
    assert value is not None
    assert b"again" not in value
    assert sealed == headers[-1:]
    writer.subjects.forget("ada")
    assert writer.seal_content(b"again", headers, OTHER_TOPIC)[0] is None


def test_two_writers_of_one_file_share_the_key_of_a_subject(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    one, other = encryption(path).subjects, encryption(path).subjects
    ids = [each.key_for(name)[0] for each in (one, other) for name in ("ada", "bob", "ada")]
    assert ids == [ids[0], ids[1], ids[0]] * 2
    other.forget("bob")
    assert one.key(ids[1]) is None
    assert one.key(ids[0]) is not None


def test_a_reader_without_the_file_or_the_key_misses_a_key(tmp_path: Path) -> None:
    stored = subject_block(encryption(tmp_path / "subjects"), "ada")
    assert isinstance(cause_of(opened(encryption(tmp_path / "none"), stored.data)), KeyMissingError)
    other = tmp_path / "other"
    subject_block(encryption(other), "bob")
    assert isinstance(cause_of(opened(encryption(other), stored.data)), KeyMissingError)
    assert isinstance(cause_of(opened(encryption(), stored.data)), InvalidSettingError)


def test_a_crash_of_a_writer_leaves_a_file_that_works(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    subject_block(encryption(path), "ada")
    whole = path.read_bytes()
    for cut in (whole[:100], whole[:-1] + b"\xff", whole + b"\x01" * 40, whole + bytes(SLOT.size)):
        path.write_bytes(cut)
        one = encryption(path).subjects
        key_id, _ = one.key_for("bob")
        assert SubjectKeys(path, environment_keys("KEYS", {"KEYS": keys_of(k1=MASTER_KEY)})).key(key_id) is not None


def test_damage_of_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    stored = subject_block(encryption(path), "ada", "bob")
    whole = path.read_bytes()
    for at in (9, 40, SLOTS_AT + 30):
        path.write_bytes(whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :])
        cause = cause_of(opened(encryption(path), stored.data))
        assert isinstance(cause, KeyMissingError), "the block is not damaged: no policy passes over it"
        assert str(path) in str(cause)

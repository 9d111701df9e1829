"""Frames: any bytes in any pieces are frames or a ProtocolError, within the memory of one frame."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import (
    DamagedMessageError,
    ForeignProtocolError,
    ProtocolError,
    TooLargeError,
    UnsupportedVersionError,
)
from memq.limits import BLOCK_BYTES_MAX, CONTROL_BODY_BYTES_MAX, FRAME_PREFIX_BYTES, KIB, MIB
from memq.protocol.frames import (
    ACK,
    ACK_POSITIONS_MAX,
    BODY_BYTES_MAX,
    HELLO_MAGIC,
    PREFIX,
    VERSIONS,
    WRITE_PREFIX,
    AckLevel,
    AckPosition,
    Api,
    Frame,
    FrameReader,
    add_checksum,
    check_hello_start,
    check_prefix,
    check_version,
    decode_positions,
    encode_ack,
    encode_frame,
    take_checksum,
)

SMALL_APIS = tuple(api for api in Api if BODY_BYTES_MAX[api] >= 4 * KIB)
U16, U64 = st.integers(0, (1 << 16) - 1), st.integers(0, (1 << 64) - 1)
frames = st.builds(
    Frame,
    st.sampled_from(SMALL_APIS).map(int),
    st.integers(0, 255),
    U16,
    U64,
    st.binary(max_size=300),
)


def encode(frame: Frame) -> bytes:
    return encode_frame(frame.api, frame.stream, frame.argument, bytes(frame.body), frame.flags)


def feed(reader: FrameReader, data: bytes, pieces: list[int]) -> list[Frame]:
    """Hand bytes to a reader in pieces of these sizes, over and over; never more than its buffer takes."""
    found: list[Frame] = []
    at = turn = 0
    while at < len(data):
        buffer = reader.get_buffer()
        assert len(buffer) > 0
        count = min(pieces[turn % len(pieces)], len(buffer), len(data) - at)
        buffer[:count] = data[at : at + count]
        found += reader.received(count)
        at, turn = at + count, turn + 1
    return found


pieces = st.lists(st.integers(1, 400), min_size=1, max_size=8)


@given(sent=st.lists(frames, max_size=12), sizes=pieces, buffer_bytes=st.sampled_from([16, 17, 64, 300, 64 * KIB]))
def test_frames_come_out_as_they_went_in_whatever_the_pieces(
    sent: list[Frame], sizes: list[int], buffer_bytes: int
) -> None:
    received = feed(FrameReader(buffer_bytes), b"".join(map(encode, sent)), sizes)
    assert [frame._replace(body=bytes(frame.body)) for frame in received] == sent


@given(sent=st.lists(frames, max_size=3), garbage=st.binary(max_size=400), sizes=pieces)
def test_any_garbage_is_frames_or_a_protocol_error(sent: list[Frame], garbage: bytes, sizes: list[int]) -> None:
    reader, found = FrameReader(64), []
    data = b"".join(map(encode, sent))
    found += feed(reader, data, sizes)
    assert len(found) == len(sent)
    try:
        found += feed(reader, garbage, sizes)
    except ProtocolError:
        return
    assert sum(FRAME_PREFIX_BYTES + len(frame.body) for frame in found) <= len(data) + len(garbage)


@given(sent=frames, sizes=pieces, cut=st.integers(1, 300))
def test_a_cut_frame_is_no_frame(sent: Frame, sizes: list[int], cut: int) -> None:
    data = encode(sent)
    assert feed(FrameReader(64), data[: max(0, len(data) - cut)], sizes) == []


def test_a_body_is_received_into_a_buffer_of_its_own_size() -> None:
    body = bytes(3 * MIB)
    data = encode_frame(Api.READ, 0, 1, body)
    reader = FrameReader()
    tracemalloc.start()
    try:
        (frame,) = feed(reader, data, [64 * KIB])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert frame.body == body
    assert peak < 4 * MIB


@given(prefix=st.builds(PREFIX.pack, st.integers(0, (1 << 32) - 1), st.integers(0, 255), st.integers(0, 255), U16, U64))
def test_a_prefix_never_makes_more_than_its_bound_be_allocated(prefix: bytes) -> None:
    reader = FrameReader(64)
    length, api = struct.unpack_from("<IB", prefix)
    try:
        feed(reader, prefix, [16])
    except ProtocolError:
        assert length > BODY_BYTES_MAX.get(api, -1)
    else:
        assert len(reader.get_buffer()) <= max(64, BODY_BYTES_MAX[api])


@pytest.mark.parametrize("api", [0, 20, 99, 255])
def test_an_unknown_api_is_refused_by_name(api: int) -> None:
    with pytest.raises(ProtocolError, match=f"unknown api {api}"):
        check_prefix(0, api)


@pytest.mark.parametrize("api", list(Api))
def test_every_api_has_its_bound(api: Api) -> None:
    bound = BODY_BYTES_MAX[api]
    assert bound <= max(CONTROL_BODY_BYTES_MAX, BLOCK_BYTES_MAX + KIB)
    check_prefix(bound + 4, api)  # with a checksum
    with pytest.raises(ProtocolError, match=f"{api.name} frame declares {bound + 5} bytes"):
        check_prefix(bound + 5, api)
    if bound <= CONTROL_BODY_BYTES_MAX:
        with pytest.raises(TooLargeError, match=api.name):
            encode_frame(api, 0, 0, bytes(bound + 1))


@pytest.mark.parametrize("positions", [[], [AckPosition(4, 9, 70, 2)]])
def test_no_bit_of_a_frame_with_a_checksum_may_differ(positions: list[AckPosition]) -> None:
    frame = encode_ack(AckLevel.ALL, 3, 9, 1, positions)
    data = b"".join(add_checksum(frame))
    assert b"".join(add_checksum(frame[:16], frame[16:])) == data
    (taken,) = feed(FrameReader(), data, [len(data)])
    assert take_checksum(taken) == Frame(Api.ACK, AckLevel.ALL, 3, 9, frame[16:])
    for bit in range(32, 8 * len(data)):  # another length gives another frame
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((DamagedMessageError, ProtocolError)):
            take_checksum(*feed(FrameReader(), bytes(changed), [len(data)]))
    for length in range(len(data) - 16):
        cut = length.to_bytes(4, "little") + data[4 : 16 + length]
        with pytest.raises(DamagedMessageError, match="wrong checksum"):
            take_checksum(*feed(FrameReader(), cut, [len(cut)]))


@given(level=st.sampled_from(AckLevel), stream=U16, next_=U64, epoch=st.integers(0, (1 << 32) - 1))
def test_acks_are_24_bytes_and_come_back(level: AckLevel, stream: int, next_: int, epoch: int) -> None:
    data = encode_ack(level, stream, next_, epoch)
    assert len(data) == ACK.size == 24
    (frame,) = feed(FrameReader(), data, [7])
    assert (frame.api, frame.flags, frame.stream, frame.argument) == (Api.ACK, level, stream, next_)
    assert struct.unpack("<II", frame.body) == (epoch, 0)


@given(positions=st.lists(st.builds(AckPosition, U64, U64, U64, U64), max_size=3), cut=st.integers(0, 40))
def test_positions_of_an_ack_come_back_and_another_length_is_refused(positions: list[AckPosition], cut: int) -> None:
    body = encode_ack(AckLevel.ALL, 1, 5, 2, positions)[16:]
    assert decode_positions(body) == positions
    if 0 < cut <= len(body):
        with pytest.raises(ProtocolError, match="number of positions"):
            decode_positions(body[:-cut])


def test_an_ack_names_no_more_places_than_its_bound() -> None:
    body = encode_ack(AckLevel.ALL, 1, 5, 2, [AckPosition(n, n + 1, 3, n) for n in range(ACK_POSITIONS_MAX + 1)])[16:]
    check_prefix(len(body), Api.ACK)
    assert decode_positions(body)[-1].first == ACK_POSITIONS_MAX - 1


def test_a_write_may_have_been_sent_before_the_connection_began() -> None:
    assert WRITE_PREFIX.unpack(WRITE_PREFIX.pack(5, Api.WRITE, 0, 1, -120_000))[4] == -120_000
    assert PREFIX.size == WRITE_PREFIX.size == FRAME_PREFIX_BYTES


# ---- the first bytes ---------------------------------------------------------------------------

HELLO = encode_frame(Api.HELLO, 0, HELLO_MAGIC, b"{}")


@pytest.mark.parametrize("count", range(len(HELLO)))
def test_a_hello_passes_from_its_first_bytes_on(count: int) -> None:
    check_hello_start(HELLO[:count])


@pytest.mark.parametrize(
    ("start", "protocol"),
    [
        (b"GET ", "HTTP"),
        (b"HEAD / HTTP/1.1\r\n", "HTTP"),
        (b"POST /x", "HTTP"),
        (b"PRI * HTTP/2.0\r\n", "HTTP"),
        (b"\x16\x03\x01\x02", "TLS"),
        (b"\x16\x03\x03\x00\xff", "TLS"),
        (b"\x00\x00\x00\x23\x00\x12\x00\x03", "Kafka"),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", "unknown"),
        (bytes(16), "Kafka"),
        (b"\xff" * 16, "unknown"),
        (PREFIX.pack(2, Api.HELLO, 0, 0, HELLO_MAGIC + 1), "unknown"),
        (PREFIX.pack(2, Api.OPEN, 0, 0, HELLO_MAGIC), "unknown"),
    ],
)
def test_other_protocols_are_named(start: bytes, protocol: str) -> None:
    with pytest.raises(ForeignProtocolError, match=protocol) as caught:
        check_hello_start(start)
    assert caught.value.hint


@given(start=st.binary(max_size=40))
def test_any_first_bytes_pass_or_are_named(start: bytes) -> None:
    try:
        check_hello_start(start)
    except ProtocolError:
        return
    assert len(start) < FRAME_PREFIX_BYTES or start[8:16] == b"memqP1\r\n"


def test_a_hello_declares_no_more_than_a_little() -> None:
    with pytest.raises(ProtocolError, match="HELLO frame declares"):
        check_hello_start(PREFIX.pack(64 * KIB, Api.HELLO, 0, 0, HELLO_MAGIC))


def test_both_sides_agree_on_the_greatest_version_that_both_speak() -> None:
    least, greatest = VERSIONS
    assert check_version(least, greatest) == greatest
    assert check_version(0, greatest + 7) == greatest
    with pytest.raises(UnsupportedVersionError, match=f"{greatest + 1} to {greatest + 2}"):
        check_version(greatest + 1, greatest + 2)

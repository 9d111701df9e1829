"""Messages round-trip, other JSON is a ProtocolError, and errors keep their hints."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from memq.errors import (
    DamagedMessageError,
    MemqError,
    MovedError,
    OutcomeUnknownError,
    ProtocolError,
    RetryableError,
    all_errors,
    kind_of,
)
from memq.format.sealed_json import is_sealed
from memq.protocol import admin_messages, group_messages, messages
from memq.protocol.messages import (
    Done,
    Nack,
    PartitionEntries,
    PartitionRef,
    PollAnswer,
    WireEntry,
    decode_message,
    encode_message,
    error_of,
    nack_of,
)
from memq.topic import TopicSettings

MESSAGES: tuple[type[msgspec.Struct], ...] = tuple(
    kind
    for module in (messages, group_messages, admin_messages)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
)


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may have."""
    if isinstance(kind, inspect.StructType):
        if kind.cls is TopicSettings:
            return st.just(TopicSettings())
        return st.builds(kind.cls, **{part.name: values(part.type) for part in kind.fields})
    if isinstance(kind, inspect.IntType):
        return st.integers(-(1 << 63), (1 << 63) - 1)
    if isinstance(kind, inspect.StrType) and kind.pattern is not None:
        return st.from_regex(kind.pattern, fullmatch=True)
    if isinstance(kind, inspect.LiteralType):
        return st.sampled_from(kind.values)
    if isinstance(kind, inspect.UnionType):
        return st.one_of(*(values(part) for part in kind.types))
    if isinstance(kind, inspect.ListType):
        return st.lists(values(kind.item_type), max_size=3)
    if isinstance(kind, inspect.VarTupleType):
        return st.lists(values(kind.item_type), max_size=3).map(tuple)
    if isinstance(kind, inspect.TupleType):
        return st.tuples(*(values(part) for part in kind.item_types))
    if isinstance(kind, inspect.DictType):
        return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
    plain: dict[type[inspect.Type], st.SearchStrategy[Any]] = {
        inspect.StrType: st.text(max_size=12),
        inspect.BytesType: st.binary(max_size=12),
        inspect.BoolType: st.booleans(),
        inspect.FloatType: st.floats(allow_nan=False, allow_infinity=False),
        inspect.NoneType: st.none(),
        inspect.RawType: st.sampled_from([b"{}", b'{"a":[1,"x"]}', b"7"]).map(msgspec.Raw),
    }
    return plain[type(kind)]


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 40


@settings(max_examples=12)
@given(data=st.data())
@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_is_read_as_it_was_written(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(values(inspect.type_info(kind)))
    assert decode_message(encode_message(message), kind) == message
    body = json.loads(encode_message(message))
    body["field_of_a_newer_version"] = [1]
    assert decode_message(json.dumps(body, separators=(",", ":")).encode(), kind) == message


def of_an_earlier_release(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message)


ANSWER = PollAnswer(
    partitions=[
        PartitionEntries(
            partition=PartitionRef(topic="clicks", topic_id="0b" * 16, partition=3),
            begin=0,
            end=19,
            next=19,
            entries=[
                WireEntry(offset=18, time_ms=1_700_000_000_000, pointer=msgspec.Raw(b'{"kind":"data","skip":[1]}'))
            ],
        )
    ]
)


def test_no_changed_bit_leaves_another_message() -> None:
    body = encode_message(ANSWER)
    plain, others = of_an_earlier_release(ANSWER), 0
    for at in range(8 * len(body)):
        changed = bytearray(body)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(DamagedMessageError, match="damaged on its way: PollAnswer message"):
            decode_message(bytes(changed), PollAnswer, checksum_wanted=True)
        with suppress(MemqError):
            assert decode_message(bytes(changed), PollAnswer) == ANSWER, "also where no checksum is wanted"
    for at in range(8 * len(plain)):
        changed = bytearray(plain)
        changed[at // 8] ^= 1 << at % 8
        with suppress(ProtocolError):
            others += decode_message(bytes(changed), PollAnswer) != ANSWER
    assert others > 50, "without a checksum many are believed"


def test_peers_of_earlier_releases_send_no_checksum_and_pass_over_it() -> None:
    plain = of_an_earlier_release(ANSWER)
    assert decode_message(plain, PollAnswer) == ANSWER
    assert msgspec.json.decode(encode_message(ANSWER), type=PollAnswer) == ANSWER
    assert not is_sealed(plain)
    assert is_sealed(encode_message(ANSWER))
    with pytest.raises(DamagedMessageError, match="without its checksum"):
        decode_message(plain, PollAnswer, checksum_wanted=True)
    assert decode_message(encode_message(Done()), Done, checksum_wanted=True) == Done()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=20)
@given(garbage=st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_any_garbage_is_a_message_or_a_protocol_error(kind: type[msgspec.Struct], garbage: bytes) -> None:
    try:
        assert isinstance(decode_message(garbage, kind), kind)
    except ProtocolError:
        return


@settings(max_examples=12)
@given(data=st.data())
@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_one_absurd_field_is_a_message_or_a_protocol_error(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    body = json.loads(encode_message(data.draw(values(inspect.type_info(kind)))))
    if body:
        body[data.draw(st.sampled_from(sorted(body)))] = data.draw(json_values | st.sampled_from([1 << 64, 1e300, -1]))
    try:
        decode_message(json.dumps(body).encode(), kind)
    except ProtocolError:
        return


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b'"\xed\xa0\x80"', b"", b"nul"])
def test_deep_and_broken_text_is_a_protocol_error(body: bytes) -> None:
    for kind in MESSAGES:
        with pytest.raises(ProtocolError, match=f"bad {kind.__name__} message: "):
            decode_message(body, kind)


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_comes_over_the_wire_as_it_is(kind: type[MemqError]) -> None:
    sent = kind("partition 7 is 'somewhere'", hint="do this", retry_after_ms=250)
    if isinstance(sent, MovedError):
        sent.address = "127.0.0.1:9"
    got = error_of(decode_message(encode_message(nack_of(sent)), Nack))
    assert type(got) is kind
    assert (str(got), got.code, got.hint, got.retry_after_ms) == (str(sent), sent.code, sent.hint, 250)
    assert getattr(got, "address", "") == getattr(sent, "address", "")
    assert kind_of(type(got)) is kind_of(kind)


def test_an_error_of_a_newer_version_keeps_its_kind() -> None:
    got = error_of(Nack(code="of-tomorrow", kind="outcome-unknown", text="who knows", hint="ask"))
    assert type(got) is OutcomeUnknownError
    assert (str(got), got.hint) == ("who knows", "ask")
    got = error_of(Nack(code="of-tomorrow", kind="neither", text="who knows"))
    assert type(got) is RetryableError
    assert str(got) == "of-tomorrow: who knows"

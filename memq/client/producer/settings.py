"""The settings of a producer, validated once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from memq.client.arguments import (
    check_callbacks,
    check_client_id,
    check_connect_timeout,
    check_number,
    check_str,
    check_switch,
    check_zone,
    encryption_of,
)
from memq.client.link_pool import CONNECT_TIMEOUT_MS
from memq.client.producer.delivery import Ack
from memq.client.transactions.undecided import TransactionChecker
from memq.errors import InvalidSettingError, MemqError
from memq.format.blocks.header import CODECS
from memq.kafka_words import KAFKA_ALL
from memq.limits import KIB, MIB, TRANSACTION_TIMEOUT_MS_MAX, TRANSACTION_TIMEOUT_MS_MIN
from memq.protocol.frames import AckLevel
from memq.topic import check_group, check_name, check_resource_name

if TYPE_CHECKING:
    from memq.encryption.encryption import Encryption

TRANSACTION_TIMEOUT_MS = 60_000
AcksLike: TypeAlias = Literal["all", 0, 1, "0", "1"]
WhenFull: TypeAlias = Literal["block", "raise"] | float
OnAck: TypeAlias = Callable[[Ack | MemqError], object]
_LEVELS: dict[object, AckLevel] = {
    "all": AckLevel.ALL,
    "1": AckLevel.ONE,
    "0": AckLevel.NONE,
    1: AckLevel.ONE,
    0: AckLevel.NONE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """The guarantees of a producer and its bounds.

    `block_bytes` is the raw size at which a block is sealed. With 512 KiB both clients need 5 to 20 % less CPU than
    with 256 KiB, and the broker needs the same. `full_wait_s` is how long `send` waits for room; None: for the delivery
    timeout.
    """

    acks: AckLevel = AckLevel.ALL
    codec: str = "zstd"
    linger_s: float = 0.005
    block_bytes: int = 512 * KIB
    pending_bytes_max: int = 64 * MIB
    full_wait_s: float | None = None
    delivery_timeout_s: float = 120.0
    metadata_timeout_s: float = 30.0
    connect_timeout_s: float = CONNECT_TIMEOUT_MS / 1000
    client_id: str = ""
    zone: str = ""
    on_ack: OnAck | None = None
    name: str = ""
    audit: bool = True
    transactional_id: str = ""
    transaction_group: str = ""
    transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS
    transaction_checker: TransactionChecker | None = None
    producer_group: str = ""
    encryption: Encryption | None = None

    @property
    def open_timeout_s(self) -> float:
        """Time-out in s to find and reach an owner, and for its answer to OPEN; several fit into a delivery."""
        return min(30.0, self.delivery_timeout_s / 4)

    @property
    def silence_s_max(self) -> float:
        """Time in s after which a silent connection that owes acks gets a request.

        The answer may take as long again. So a link that broke unnoticed is noticed while blocks can still go to
        another owner, and not much later than the governor notices a dead broker.
        """
        return min(5.0, self.delivery_timeout_s / 8)


def producer_settings(
    *,
    acks: AcksLike,
    codec: str,
    linger_ms: float,
    block_bytes: int,
    pending_bytes_max: int,
    when_full: WhenFull,
    delivery_timeout_ms: float,
    metadata_timeout_ms: float,
    connect_timeout_ms: int,
    client_id: str,
    zone: str,
    on_ack: OnAck | None,
    name: str | None,
    audit: bool,
    transactional_id: str | None = None,
    transaction_group: str | None = None,
    transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS,
    transaction_checker: TransactionChecker | None = None,
    producer_group: str | None = None,
    encryption: Encryption | str | None = None,
) -> ProducerSettings:
    """Check the arguments of a producer.

    Raises: InvalidSettingError, which names the wrong argument; InvalidNameError; KeyProviderError.
    """
    if isinstance(acks, bool) or acks not in tuple(_LEVELS):  # a tuple: the value may have no hash
        raise InvalidSettingError(f"acks = {acks!r} is not 0, 1 or 'all'", hint=KAFKA_ALL if str(acks) == "-1" else "")
    if codec not in tuple(CODECS):
        raise InvalidSettingError(f"codec = {codec!r} is not one of {', '.join(CODECS)}")
    check_callbacks(on_ack=on_ack)
    check_switch("audit", audit)
    if name is not None:
        check_str("name", name)
        check_name(name, "producer")
    if name and acks != "all":
        raise InvalidSettingError(f"acks = {acks!r} of producer '{name}'", hint="a named producer has acks='all'")
    _check_transactions(transactional_id, transaction_group, transaction_timeout_ms, name, acks)
    _check_producer_group(transaction_checker, producer_group, transactional_id, transaction_group)
    check_number("linger_ms", linger_ms, 0, 60_000)
    check_number("block_bytes", block_bytes, KIB, MIB)  # at 1 MiB the bounds of records and names can't be met
    check_number("pending_bytes_max", pending_bytes_max, 2 * block_bytes, 1 << 40)
    check_number("delivery_timeout_ms", delivery_timeout_ms, 1, 86_400_000)
    check_number("metadata_timeout_ms", metadata_timeout_ms, 1, 86_400_000)
    return ProducerSettings(
        acks=_LEVELS[acks],
        codec=codec,
        linger_s=linger_ms / 1000,
        block_bytes=block_bytes,
        pending_bytes_max=pending_bytes_max,
        full_wait_s=_full_wait_s(when_full),
        delivery_timeout_s=delivery_timeout_ms / 1000,
        metadata_timeout_s=metadata_timeout_ms / 1000,
        connect_timeout_s=check_connect_timeout(connect_timeout_ms) / 1000,
        client_id=check_client_id(client_id),
        zone=check_zone(zone),
        on_ack=on_ack,
        name=name or "",
        audit=audit,
        transactional_id=transactional_id or "",
        transaction_group=transaction_group or "",
        transaction_timeout_ms=transaction_timeout_ms,
        transaction_checker=transaction_checker,
        producer_group=producer_group or (transactional_id or "" if transaction_checker is not None else ""),
        encryption=encryption_of(encryption),
    )


def _check_transactions(
    transactional_id: str | None, group: str | None, timeout_ms: int, name: str | None, acks: AcksLike
) -> None:
    """Check the arguments of a transactional producer. Raises: InvalidSettingError, InvalidNameError."""
    check_number("transaction_timeout_ms", timeout_ms, TRANSACTION_TIMEOUT_MS_MIN, TRANSACTION_TIMEOUT_MS_MAX)
    if transactional_id is None:
        if group is not None:
            raise InvalidSettingError("transaction_group without transactional_id", hint="pass both")
        return
    check_str("transactional_id", transactional_id)
    check_resource_name(transactional_id, "transactional id")
    if group is not None:
        check_str("transaction_group", group)
        check_group(group)
    if name is not None or acks != "all":
        other = f"acks = {acks!r}" if name is None else f"name = '{name}'"
        raise InvalidSettingError(
            f"transactional_id = '{transactional_id}' together with {other}",
            hint="a transactional producer has acks='all' and no name: its transactional id outlives restarts",
        )


def _check_producer_group(
    checker: TransactionChecker | None, producer_group: str | None, transactional_id: str | None, group: str | None
) -> None:
    """Check the arguments of a producer that prepares.

    Raises: InvalidSettingError, InvalidNameError, TypeError.
    """
    check_callbacks(transaction_checker=checker)
    if producer_group is not None:
        check_str("producer_group", producer_group)
        check_resource_name(producer_group, "producer group")
    elif checker is None:
        return
    if transactional_id is None:
        raise InvalidSettingError(
            "transaction_checker or producer_group without transactional_id", hint="pass transactional_id='…', too"
        )
    if group is not None:
        raise InvalidSettingError(
            f"transaction_group = '{group}' together with a checker or a producer group",
            hint="positions move as a member of a generation, which may be over when a checker decides",
        )


def _full_wait_s(when_full: object) -> float | None:
    if when_full == "block":
        return None
    if when_full == "raise":
        return 0.0
    if isinstance(when_full, bool) or not isinstance(when_full, int | float) or not 0 <= when_full <= 86_400:
        raise InvalidSettingError(f"when_full = {when_full!r} is not 'block', 'raise' or seconds")
    return float(when_full)

"""Cuts a stream of bytes into records: by a delimiter, a key in front of each when asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memq.errors import TooLargeError
from memq.limits import BLOCK_RAW_BYTES_MAX


def split_records(chunks: Iterable[bytes], delimiter: bytes) -> Iterator[list[bytes]]:
    """Yield the records that each chunk completes; the last one needs no delimiter behind it.

    What waits for its delimiter is bounded by the largest block. Raises: TooLargeError.
    """
    carry = bytearray()
    done = 0
    for chunk in chunks:
        # Only the new bytes, and the start of a delimiter before them, are searched: a record that comes
        # in many chunks must not be searched again with each.
        if chunk.find(delimiter) < 0 and (bytes(carry[-len(delimiter) :]) + chunk).find(delimiter) < 0:
            carry += chunk
            _check_bound(len(carry), done)
            continue
        *records, rest = (bytes(carry) + chunk).split(delimiter)
        carry = bytearray(rest)
        done += len(records)
        _check_bound(len(carry), done)
        yield records
    if carry:
        yield [bytes(carry)]


def _check_bound(waiting: int, done: int) -> None:
    if waiting > BLOCK_RAW_BYTES_MAX:
        raise TooLargeError(
            f"record {done + 1} has more than {BLOCK_RAW_BYTES_MAX} bytes without a delimiter",
            hint="give its delimiter with -D",
        )


def split_keys(records: list[bytes], separator: bytes) -> tuple[list[bytes | None], list[bytes]]:
    """Return keys and values: the text before the first separator is the key.

    Without one there is none.
    """
    keys: list[bytes | None] = []
    values: list[bytes] = []
    for record in records:
        key, found, value = record.partition(separator)
        keys.append(key if found else None)
        values.append(value if found else record)
    return keys, values

"""Grammar of object keys, repeated keys in a listing, and size limits, the same for every store."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from memq.errors import InvalidRequestError, TooLargeError
from memq.limits import OBJECT_BYTES_MAX
from memq.storage_handlers import ObjectEntry

KEY_CHARS_MAX = 1_024  # what S3 allows

# The characters of names (DESIGN: one grammar in names, keys, znodes, metrics and logs). It leaves out what
# some file system reads in its own way (backslash, colon, NUL, wildcards), and what is longer than a file's name.
_PART = re.compile(r"[A-Za-z0-9._-]{1,255}\Z")


def check_key(key: str) -> str:
    """Return `key` when each of its parts between slashes is a name, and none is `.` or `..`.

    Raises: InvalidRequestError, with the key shortened when it is long.
    """
    if not 1 <= len(key) <= KEY_CHARS_MAX:
        raise InvalidRequestError(f"key {_shown(key)} has {len(key)} characters, 1 to {KEY_CHARS_MAX} are allowed")
    for part in key.split("/"):
        _check_part(part, key)
    return key


def check_size(key: str, size: int) -> int:
    """Return the size of an object that is to be read whole. Raises: TooLargeError."""
    if size > OBJECT_BYTES_MAX:
        raise TooLargeError(
            f"'{key}' has {size} bytes, an object has at most {OBJECT_BYTES_MAX}", hint="no broker wrote it"
        )
    return size


def check_prefix(prefix: str) -> str:
    """Return `prefix` when keys can start with it: the last part may be empty or cut anywhere.

    Raises: InvalidRequestError.
    """
    if len(prefix) > KEY_CHARS_MAX:
        raise InvalidRequestError(
            f"prefix {_shown(prefix)} has {len(prefix)} characters, at most {KEY_CHARS_MAX} are allowed"
        )
    *folders, last = prefix.split("/")
    for part in folders:
        _check_part(part, prefix)
    if last.strip("."):
        _check_part(last, prefix)
    return prefix


class ListedKeys:
    """Entries of a listing, page by page, without repeats from the same page or the last two.

    Nothing is said of their order: some servers list by key, others folder by folder.
    """

    def __init__(self) -> None:
        self._pages: deque[frozenset[str]] = deque(maxlen=2)

    def new(self, page: Sequence[ObjectEntry]) -> list[ObjectEntry]:
        """Return what has not come yet."""
        known = {key for keys in self._pages for key in keys}
        found: dict[str, ObjectEntry] = {}
        for entry in page:
            if entry.key not in known:
                found.setdefault(entry.key, entry)
        self._pages.append(frozenset(entry.key for entry in page))
        return list(found.values())


def _check_part(part: str, key: str) -> None:
    if not _PART.match(part) or part in (".", ".."):
        raise InvalidRequestError(
            f"key {_shown(key)} has a part that is not allowed: {_shown(part)}",
            hint="parts between slashes are 1 to 255 of A-Z a-z 0-9 . _ -, neither '.' nor '..'",
        )


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:77] + "...")

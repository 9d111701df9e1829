"""Patterns of rules: a name, or a prefix with a final `*`. Pure."""

from __future__ import annotations

from memq.errors import InvalidRequestError

NAME_CHARACTERS_MAX = 256
EVERY = "*"


def matches(pattern: str, name: str) -> bool:
    """Whether a name is the pattern, or begins with it up to a final `*`."""
    return name.startswith(pattern[:-1]) if pattern.endswith(EVERY) else name == pattern


def check_pattern(what: str, pattern: str) -> None:
    """Check a name, or a prefix with a final `*`. Raises: InvalidRequestError."""
    inner = pattern.removesuffix(EVERY)
    if not pattern or len(pattern) > NAME_CHARACTERS_MAX or not pattern.isprintable() or EVERY in inner:
        raise InvalidRequestError(
            f"{what} {pattern[:60]!a} of a rule is no name, and no prefix with a final '*'",
            hint=f"give 1 to {NAME_CHARACTERS_MAX} printable characters, and '*' only as the last one",
        )

"""The one error of the launcher: what did not come up or could not be fetched, and what to do about it."""

from __future__ import annotations


class LocalstackError(Exception):
    """A server, a jar or a Java is missing or did not do what it should; the message says which and why."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")

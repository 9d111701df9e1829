"""Real Kafka, ZooKeeper and S3 on one machine, by pip alone: for tests, demos and first trials.

`memq_localstack.servers` starts them from Python, `memq-localstack up|down|status` from a shell. Nothing here is
imported by memq, and nothing here imports it.
"""

from __future__ import annotations


class LocalstackError(Exception):
    """A server, a jar or a Java is missing or did not do what it should; the message says which and why."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")

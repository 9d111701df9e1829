"""Certificates for tests, made by `memq certs` itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from memq.cli import run
from memq.runtime.clock import SystemClock
from memq.runtime.tls import Tls

EXPIRED_MS = 30 * 86_400_000


class Certificates:
    """An authority in a folder, and what it issues."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        assert run.run(["certs", "init", "--dir", str(folder)]) == run.OK

    def issue(self, name: str, *hosts: str, again: bool = False) -> Tls:
        """Make or replace a certificate, and return it with its authority."""
        options = [option for host in hosts for option in ("--host", host)]
        options += ["--replace"] if again else []
        return self._issue(name, options)

    def issue_expired(self, name: str, *hosts: str) -> Tls:
        """Make a certificate whose validity has ended."""
        with pytest.MonkeyPatch.context() as patch:
            now_ms = SystemClock().wall_ms()
            patch.setattr(SystemClock, "wall_ms", lambda _: now_ms - EXPIRED_MS)
            return self._issue(name, ["--days", "1", *(option for host in hosts for option in ("--host", host))])

    def _issue(self, name: str, options: list[str]) -> Tls:
        assert run.run(["certs", "issue", name, "--dir", str(self.folder), *options]) == run.OK
        return Tls(
            ca_file=str(self.folder / "ca.pem"),
            cert_file=str(self.folder / f"{name}.pem"),
            key_file=str(self.folder / f"{name}-key.pem"),
        )

    @property
    def trusted(self) -> Tls:
        """The authority alone, for a client without a certificate."""
        return Tls(ca_file=str(self.folder / "ca.pem"))

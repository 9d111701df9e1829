"""Certificates for tests, made by `memq certs` itself."""

from __future__ import annotations

from pathlib import Path

from memq.cli import run
from memq.runtime.tls import Tls


class Certificates:
    """An authority in a folder, and what it issues."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        assert run.run(["certs", "init", "--dir", str(folder)]) == run.OK

    def issue(self, name: str, *hosts: str, again: bool = False) -> Tls:
        """Make or replace a certificate, and return it with its authority."""
        options = [option for host in hosts for option in ("--host", host)]
        options += ["--replace"] if again else []
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

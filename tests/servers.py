"""`memq dev` as a real process on a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.memq_process import BrokerServer


class DevServer(BrokerServer):
    """One folder on which `memq dev` runs."""

    def __init__(self, data: Path, *options: str, http: bool = False) -> None:
        super().__init__(data.parent / f"{data.name}.log")
        self.data = data
        self._options = ["--http-port", "0" if http else "-1", *options]
        if "--dashboard-port" not in options:
            self._options += ["--dashboard-port", "-1"]

    def command(self) -> list[str]:
        """Return what Python is given to start it."""
        return ["-m", "memq", "dev", "--data", str(self.data), "--port", str(self.port), *self._options]

    def objects_of(self, topic: str) -> list[Path]:
        """Return the files of a topic's own objects; reports to the audit lie in shared ones."""
        found = (self.data / "objects").glob(f"*/topics/{topic}/**/*")
        return sorted(path for path in found if path.is_file())


@contextmanager
def dev_server(data: Path, *options: str, http: bool = False) -> Iterator[DevServer]:
    """Run `memq dev` on a folder for a test."""
    server = DevServer(data, *options, http=http)
    try:
        server.start()
        yield server
    finally:
        server.close()

"""The client processes of a chaos run; each start is a life with a journal of its own."""

from __future__ import annotations

import threading
from pathlib import Path

from memq_localstack.processes import kill_session
from tests.memq_process import MemqProcess

SIZE = 100  # bytes of a value
QUERIES = ("files", "copies")  # of Spark; each has a folder with its checkpoint


class Client(MemqProcess):
    """One worker process (`tests/chaos/workers.py`)."""

    module = "tests.chaos.workers"
    end_s = 300.0  # what it has to come to its end in a healed world

    def __init__(self, folder: Path, name: str, kind: str, topic: str, brokers: str, **options: object) -> None:
        super().__init__(folder / f"{name}.log")
        self.name = name
        self.kind = kind
        self.lives = 0
        self._folder = folder
        self._pause = threading.Event()  # never set: it paces a wait
        self._arguments = ["--name", name, "--topic", topic, "--brokers", brokers]
        for key, value in options.items():
            self._arguments += [f"--{key}"] if value is True else [f"--{key}", str(value)]

    def command(self) -> list[str]:
        """Return what Python is given to start it."""
        more = ["--journal", str(self._journal(self.lives)), "--life", str(self.lives), "--size", str(SIZE)]
        return ["-m", self.module, self.kind, *self._arguments, *more]

    def begin(self) -> None:
        """Start a new life."""
        self.launch()
        self.lives += 1

    def end(self) -> None:
        """Ask it to end in order, once it listens: from then on it has a journal."""
        while self.runs and not self._journal(self.lives - 1).exists():
            self._pause.wait(0.1)
        if self.runs:
            self.signal()

    def _journal(self, life: int) -> Path:
        return self._folder / f"{self.name}.{life}.journal"

    @property
    def may_be_struck(self) -> bool:
        """Whether this life has come so far that a fault finds something to break."""
        return True

    @property
    def runs(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None


class SparkClient(Client):
    """Streaming queries of Spark (`tests/chaos/spark_worker.py`): driver, JVM and tasks are one session."""

    module = "tests.chaos.spark_worker"
    end_s = 900.0  # it may have all of the run to read

    _committed: tuple[int, ...] = (0,) * len(QUERIES)  # micro-batches before this life, by query

    def begin(self) -> None:
        """Start a new life."""
        self._committed = self._count()
        super().begin()

    @property
    def may_be_struck(self) -> bool:
        """Whether this life has committed a micro-batch of each query: on a busy machine that takes minutes."""
        return all(now > before for now, before in zip(self._count(), self._committed, strict=True))

    def _count(self) -> tuple[int, ...]:
        return tuple(len(list((self._folder / self.name / query / "commits").glob("[0-9]*"))) for query in QUERIES)

    def kill(self) -> None:
        """End driver, JVM and tasks as `kill -9` does."""
        kill_session(self.process.pid)
        super().kill()

    def close(self) -> None:
        """End what still runs."""
        if self.lives:
            kill_session(self.process.pid)
        super().close()

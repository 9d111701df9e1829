"""Fixtures and hooks of all tests: deterministic property tests, time limits, no thread left."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import weakref
from asyncio import selector_events
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from memq.runtime.process import DESTROYER
from memq_localstack import guard, ports
from memq_localstack.servers import Server, start_zookeeper
from tests.soak import SOAKING

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # workers, and the hundreds of processes that tests start, inherit it
sys.dont_write_bytecode = False
guard.begin()  # a run that is killed leaves no server behind
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background of a shell: children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def own_ports() -> None:
    """Draw ports from a part of the range that no other worker has.

    A server's port is drawn long before it listens, and kept while it is down: another worker's would take it.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = (ports.LAST - ports.FIRST + 1) // workers
    ports.FIRST += number * share
    ports.LAST = ports.FIRST + share - 1


own_ports()

# No deadline: nothing here asserts a time. Derandomized: a red build is red again on the next machine.
settings.register_profile(
    "check", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "quick", derandomize=True, deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("deep", deadline=None, max_examples=5_000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "check"))


# Long files begin first: what begins last must be short, or one worker is at work alone in the end. Files that wait for
# servers begin before those that only compute: next to a session of Spark they leave time of the cores, and simulated
# runs, one by one, need all of it.
LONG_FIRST = ("tests/chaos/test_run.py", "tests/spark/", "tests/integration/", "tests/simulation/", "tests/chaos/", "")
SERVERS_S_MAX = 900
SOAK_S_MAX = 4 * 3_600


class OneSparkScheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """Files go to whichever worker is free, but all that need Spark to one: a session takes 1 GB and long to start.

    Runs of the simulation share nothing, and take seconds each: they go one by one.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/simulation/"):
            return nodeid
        return "tests/spark" if nodeid.startswith("tests/spark/") else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., None]) -> OneSparkScheduling | None:
    """Tell xdist how to share out tests by files."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # else files with many tests come first, and those are the quick ones
    return OneSparkScheduling(config, log)


def limit_s(item: pytest.Item) -> int:
    """Return after how many seconds a test that still runs has failed; its fixtures count, servers among them."""
    if SOAKING and item.get_closest_marker("soak"):
        return SOAK_S_MAX
    return SERVERS_S_MAX if item.nodeid.startswith(LONG_FIRST[:-1]) else int(item.config.getini("timeout"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests in the order of `LONG_FIRST`, files as they are, and give each its time limit."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit_s(item)))
    items.sort(key=lambda item: next(at for at, folder in enumerate(LONG_FIRST) if item.nodeid.startswith(folder)))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays to the end: the tests themselves, and all modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail a test that leaves a thread of its own running: whoever starts one ends it.

    The clients' I/O thread is the process's, not a test's, as is one that keeps a client of Kafka.
    """
    before = threading.enumerate()
    yield
    new = [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    left = [thread.name for thread in new if thread.name not in ("memq-io", DESTROYER)]
    assert not left, f"the test left threads: {left}"


_Transport: Any = vars(selector_events)["_SelectorTransport"]
LOOP = "_loop"  # of an asyncio transport: a slot, which `vars` does not have
_transports: weakref.WeakSet[Any] = weakref.WeakSet()
_begin_transport = _Transport.__init__


def _noted_transport(self: Any, *arguments: Any, **options: Any) -> None:
    _transports.add(self)
    _begin_transport(self, *arguments, **options)


_Transport.__init__ = _noted_transport


def check_transports() -> None:
    """Fail when a loop ended with open transports, and close them: the garbage collector would warn of them later."""
    left: list[str] = []
    for transport in list(_transports):
        state = vars(transport)
        loop = getattr(transport, LOOP)  # None once it is closed
        if state.get("_sock") is not None and loop is not None and loop.is_closed():
            left.append(f"{transport!r} of {state.get('_protocol')!r}, from {state['_sock']!r}")
            state["_sock"].close()
            state["_sock"] = None
    assert not left, f"a loop was closed with open transports: {left}"


@pytest.fixture(autouse=True)
def no_transport_left() -> Iterator[None]:
    """Fail a test that leaves open transports in a closed loop."""
    yield
    check_transports()


@pytest.fixture(autouse=True, scope="module")
def no_transport_left_by_module() -> Iterator[None]:
    """The same for the servers that the tests of a module share; it ends after them."""
    yield
    check_transports()


@pytest.fixture(autouse=True)
def logger_as_it_was() -> Iterator[None]:
    """Take back level and handlers of memq's logger, which a command that runs in the process sets."""
    logger = logging.getLogger("memq")
    level, handlers, propagate = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.setLevel(level)
    logger.handlers[:], logger.propagate = handlers, propagate


@pytest.fixture(autouse=True, scope="session")
def no_settings_from_outside() -> Iterator[None]:
    """Take the machine's MEMQ_… variables away, so that a developer's settings change no result, nor a server's."""
    kept = ("MEMQ_NATIVE", "MEMQ_REQUIRE_SERVERS")  # of the run: servers use the same kernel as the tests
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("MEMQ_") and name not in kept]:
            environment.delenv(name)
        yield


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a real ZooKeeper for all tests that want one; each has a path of its own there."""
    with ExitStack() as stack:
        yield stack.enter_context(start_zookeeper(tmp_path_factory.mktemp("zookeeper")))

"""The sync producer: threads, waiting, callbacks, fork, exit, and the I/O thread it shares."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

import memq
import memq.aio
from memq.client import io_thread as io_thread_module
from memq.client.io_thread import io_thread, new_event_loop
from memq.client.lifecycle import Background
from memq.client.producer.core import ProducerCore
from memq.client.producer.delivery import Ack, Delivery
from memq.client.producer.producer import Producer
from memq.errors import (
    BufferFullError,
    ClosedError,
    CorruptDataError,
    ForkedError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    OutcomeUnknownError,
    TimedOutError,
)
from memq.protocol.frames import Api, Frame
from tests.unit.toy_broker import Server, ToyConnection, turns, until


def last_background() -> Background[ProducerCore]:
    """Return what the I/O thread has of the producer that was made last."""
    client = io_thread().clients()[-1]
    assert isinstance(client, Background)
    assert isinstance(client.core, ProducerCore)
    return client


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_the_public_face_has_the_producer() -> None:
    assert memq.Producer is Producer
    assert memq.Delivery is Delivery
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        memq.Nothing  # noqa: B018
    assert {"Producer", "aio", "errors"} <= set(dir(memq))
    assert "Producer" in dir(memq.aio)


def test_send_and_wait(server: Server) -> None:
    with memq.Producer(server.broker.address) as producer:
        delivery = producer.send("clicks", b"v", key=b"k")
        ack = delivery.result(timeout=20)
        assert (ack.topic, ack.partition, ack.first_sequence, ack.records) == ("clicks", 0, 0, 1)
        assert delivery.done()
        assert delivery.exception() is None
        deliveries = producer.send_many("clicks", [b"%d" % number for number in range(1_000)], tag="t")
        producer.flush(timeout=20)
        assert all(each.done() for each in deliveries)
        stats = producer.stats()
        assert (stats.records_acked, stats.records_failed, stats.pending_records) == (1_001, 0, 0)
    assert server.broker.values() == [b"v"] + [b"%d" % number for number in range(1_000)]
    assert server.broker.closes[0].next_sequence == 1_001


def test_many_threads_share_a_producer(server: Server) -> None:
    def work(name: int) -> None:
        for number in range(2_000):
            producer.send("clicks", b"%d-%06d" % (name, number))

    with Producer(server.broker.address, block_bytes=4_096) as producer:
        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        producer.flush(20)
    values = server.broker.values()
    assert len(values) == 8_000
    for name in range(4):
        mine = [value for value in values if (value or b"").startswith(b"%d-" % name)]
        assert mine == [b"%d-%06d" % (name, number) for number in range(2_000)]


def test_waiting_has_a_bound_and_drops_nothing(server: Server) -> None:
    server.broker.acking = False
    with Producer(server.broker.address) as producer:
        delivery = producer.send("clicks", b"v")
        with pytest.raises(TimedOutError, match="not acked after"):
            delivery.result(0.01)
        with pytest.raises(TimedOutError, match="1 record is still pending"):
            producer.flush(0.01)
        server.until(lambda: len(server.broker.blocks) == 1)
        server.call(server.ack_all)
        assert delivery.result(20).records == 1


def test_a_full_buffer_blocks_until_there_is_room_or_raises(server: Server) -> None:
    server.broker.acking = False
    small = {"pending_bytes_max": 60_000, "block_bytes": 10_000, "codec": "none"}
    impatient = Producer(server.broker.address, when_full="raise", **small)  # type: ignore[arg-type]
    with pytest.raises(BufferFullError):
        impatient.send_many("clicks", [b"x" * 1_000] * 100)
    with pytest.raises(TimedOutError):
        impatient.close(0.01)
    with Producer(server.broker.address, **small) as patient:  # type: ignore[arg-type]
        before = len(server.broker.headers)
        deliveries: list[Delivery] = []

        def fill() -> None:
            deliveries.extend([patient.send("clicks", b"y" * 1_000) for _ in range(300)])

        filler = threading.Thread(target=fill)
        filler.start()
        server.until(lambda: len(server.broker.headers) >= before + 3)
        assert filler.is_alive()
        server.broker.acking = True
        server.call(server.ack_all)
        filler.join(20)
        assert not filler.is_alive()
        waiting = last_background().core.buffer.waiting
        assert waiting == 0, "else each block that is acked wakes threads that do not wait"
        assert all(delivery.result(20) for delivery in deliveries)
    assert server.broker.values().count(b"y" * 1_000) == 300


def test_callbacks_run_on_the_io_thread_and_cannot_wait_there(server: Server) -> None:
    heard: list[str] = []
    done = threading.Event()

    def on_ack(outcome: Ack | MemqError) -> None:
        heard.append(threading.current_thread().name)
        for wait in (lambda: producer.flush(1), lambda: pending[-1].result(1)):
            try:
                wait()
            except InvalidRequestError:
                heard.append("refused")
        done.set()

    pending: list[Delivery] = []
    with Producer(server.broker.address, on_ack=on_ack) as producer:
        server.broker.acking = False
        producer.send("clicks", b"first")
        server.until(lambda: len(server.broker.blocks) == 1)
        pending.append(producer.send("clicks", b"second", partition=0))
        assert not pending[-1].done()
        server.broker.acking = True
        server.call(lambda: server.broker.connections[0].ack(1))
        assert done.wait(20)
        pending[-1].result(20)
    assert heard[0] == "memq-io"
    assert "refused" in heard


def test_a_callback_of_a_delivery_is_called_once(server: Server) -> None:
    called: list[Delivery] = []
    with Producer(server.broker.address) as producer:
        delivery = producer.send("clicks", b"v")
        delivery.add_done_callback(called.append)
        delivery.result(20)
        delivery.add_done_callback(called.append)
        producer.flush(20)
    assert called == [delivery, delivery]


def test_use_after_close_is_refused_and_closing_twice_is_fine(server: Server) -> None:
    producer = Producer(server.broker.address)
    producer.send("clicks", b"v")
    producer.close()
    producer.close()
    for use in (lambda: producer.send("clicks", b"v"), lambda: producer.send_many("clicks", [b"v"], keys=[b"k"])):
        with pytest.raises(ClosedError):
            use()
    assert server.broker.values() == [b"v"]


def test_leaving_by_an_exception_never_hides_it(server: Server) -> None:
    server.broker.acking = False

    def leave() -> None:
        with Producer(server.broker.address, delivery_timeout_ms=50) as producer:
            producer.send("clicks", b"v")
            raise ValueError("the caller's own")

    with pytest.raises(ValueError, match="the caller's own"):
        leave()

    def forget() -> None:
        with Producer(server.broker.address, delivery_timeout_ms=50) as producer:
            producer.send("clicks", b"v")

    with pytest.raises((OutcomeUnknownError, TimedOutError)):  # the latter when the machine is slow
        forget()  # nobody checked the delivery: the end of the block tells


def test_errors_of_the_cluster_reach_the_caller(server: Server) -> None:
    def refuse(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.WRITE and connection.streams[frame.stream].open:
            connection.nack(frame, CorruptDataError("bad"))
        return frame.api == Api.WRITE

    with Producer(server.broker.address) as producer:
        with pytest.raises(NotFoundError):
            producer.send("nothing", b"v")
        server.broker.script = refuse
        delivery = producer.send("clicks", b"v")
        with pytest.raises(CorruptDataError):
            delivery.result(20)
        assert isinstance(delivery.exception(), CorruptDataError)


def test_an_error_that_the_program_has_not_read_is_raised_by_the_first_close_alone(server: Server) -> None:
    def refuse(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.WRITE:
            connection.nack(frame, CorruptDataError("a bit was flipped"))
        return frame.api == Api.WRITE

    server.broker.script = refuse
    producer = Producer(server.broker.address)
    producer.send("clicks", b"v")
    with pytest.raises(CorruptDataError):
        producer.close()
    producer.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_must_not_use_what_its_parent_made(server: Server) -> None:
    producer = Producer(server.broker.address)
    acked = producer.send("clicks", b"parent")
    acked.result(20)
    pending = Delivery()  # of a block that the parent's thread would settle
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        uses = (lambda: producer.send("clicks", b"child"), lambda: producer.flush(1), producer.stats)
        for use in (*uses, lambda: pending.result(1), lambda: pending.exception(1), lambda: acked.result(1)):
            try:
                use()
            except (ForkedError, TimedOutError) as error:
                said.append(str(error))
        producer.close()  # does nothing, and does not hang
        with Producer(server.broker.address) as own:
            own.send("clicks", b"child's own").result(20)
        os.write(write_end, "\n".join(said).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        said = pipe.read().decode().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    assert len(said) == 5
    assert all(f"can't be used in process {child}" in each for each in said)
    assert said[3].startswith("this delivery was created before fork()")
    producer.send("clicks", b"parent again").result(20)
    producer.close()
    assert sorted(value or b"" for value in server.broker.values()) == [b"child's own", b"parent", b"parent again"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_while_threads_send_does_not_hang_the_child(server: Server) -> None:
    """A thread may have got the producer's lock at this moment and not yet run."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            producer.send("clicks", b"v", partition=0)

    with Producer(server.broker.address, codec="none", block_bytes=4_096, pending_bytes_max=1 << 20) as producer:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        hung = 0
        for _ in range(5):
            producer.send("clicks", b"v").result(20)
            read_end, write_end = os.pipe()
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.close(write_end)
            hung += not select.select([read_end], [], [], 20)[0]  # the pipe ends with the child
            os.close(read_end)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        ended.set()
        for thread in threads:
            thread.join()
    assert hung == 0


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_client_is_neither_pickled_nor_copied(copied: Callable[[object], object]) -> None:
    nowhere = "127.0.0.1:1"  # no client connects before its first use
    with closing(Producer(nowhere)) as producer, closing(memq.Consumer(nowhere, ["clicks"])) as consumer:
        for client in (producer, consumer, memq.aio.Producer(nowhere), memq.aio.Consumer(nowhere, ["clicks"])):
            with pytest.raises(TypeError, match="can't be pickled or copied: create it in the process that uses it"):
                copied(client)


def test_a_forgotten_producer_is_warned_of_and_still_sends(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    before = io_thread().clients()
    producer = Producer(server.broker.address)
    producer.send("clicks", b"v")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del producer
        gc.collect()
    assert ResourceWarning in [each.category for each in warned if "memq.Producer" in str(each.message)]
    server.until(lambda: len(server.broker.closes) == 1)
    assert server.broker.values() == [b"v"]
    io_thread().run(until(lambda: io_thread().clients() == before))
    io_thread().run(turns(2))
    assert "producer.forgotten" not in caplog.text


def test_a_forgotten_producer_is_closed_also_where_warnings_are_errors(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed open until the end of the process."""
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: raised.append(each.exc_type))
    producer = Producer(server.broker.address)
    producer.send("clicks", b"v").result(20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del producer  # the last reference: no collector is needed
    assert raised == [ResourceWarning]
    server.until(lambda: len(server.broker.closes) == 1)


def test_at_exit_what_waits_is_flushed_with_a_warning(server: Server) -> None:
    code = (
        "import memq, sys\n"
        f"producer = memq.Producer({server.broker.address!r})\n"
        "producer.send('clicks', b'last words')\n"
        "keep = producer\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert server.broker.values() == [b"last words"]
    assert "not closed before exit" in done.stderr
    assert "Traceback" not in done.stderr


def test_at_exit_a_client_that_fails_leaves_the_others_their_flush(server: Server) -> None:
    code = (
        "import memq\n"
        "from memq.client.io_thread import io_thread\n"
        "class Broken:\n"
        "    async def at_exit(self):\n"
        "        raise OSError('it broke')\n"
        "    def forked(self):\n"
        "        pass\n"
        "io_thread().add_client(Broken())\n"
        f"producer = memq.Producer({server.broker.address!r})\n"
        "producer.send('clicks', b'last words')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert server.broker.values() == [b"last words"]
    assert "Traceback" not in done.stderr


class Open:
    """A client that nobody closes, whose flush is over when it may be."""

    def __init__(self, may_end: bool = True, *, fails: bool = False) -> None:
        self.may_end = may_end
        self.fails = fails
        self.finished = False

    def forked(self) -> None:
        pass

    async def at_exit(self) -> None:
        if self.fails:
            raise OSError("it broke")
        if not self.may_end:
            await asyncio.get_running_loop().create_future()
        self.finished = True


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        ([], []),
        ([Open()], ["a memq client was not closed before exit"]),
        ([Open(), Open()], ["2 memq clients were not closed before exit"]),
        ([Open(fails=True), Open()], ["2 memq clients were not closed before exit"]),
        (
            [Open(may_end=False)],
            ["a memq client was not closed before exit", "memq gave up flushing at exit after 0.01 s"],
        ),
    ],
)
def test_at_exit_only_clients_that_are_open_are_warned_of(
    clients: list[Open], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.enumerate()
    thread = io_thread_module.IoThread()
    (worker,) = [each for each in threading.enumerate() if each not in before]
    assert worker.daemon, "it holds up no program that ends"
    waited: list[bool] = []
    monkeypatch.setattr(io_thread_module, "wait_for_native_threads", lambda: waited.append(True))
    monkeypatch.setattr(io_thread_module, "EXIT_FLUSH_S_MAX", 0.01)
    gone = thread.add_client(Open())
    numbers = [thread.add_client(client) for client in clients]
    assert len({gone, *numbers}) == 1 + len(clients)
    thread.remove_client(gone)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        io_thread_module.flush_clients(thread)
    assert [str(each.message) for each in warned] == said
    assert [client.finished for client in clients] == [client.may_end and not client.fails for client in clients]
    assert len(waited) == bool(clients)
    thread.call(thread.loop.stop)
    worker.join(20)
    assert not worker.is_alive()
    thread.loop.close()


def test_a_child_does_not_wait_for_a_lock_that_its_parent_held(server: Server) -> None:
    producer = Producer(server.broker.address)
    background = last_background()
    buffer = background.core.buffer
    for held in (True, False):
        if held:
            buffer.lock.acquire()  # by a thread that the child would not have
        buffer.waiting = 3
        background.forked()
        assert (buffer.waiting, buffer.lock.locked()) == (0, False)
        with pytest.raises(ForkedError):
            producer.send("clicks", b"v")
    background.was_forked = False
    producer.close()


def test_the_io_thread_is_one_and_a_daemon() -> None:
    assert io_thread() is io_thread()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "memq-io"]
    assert thread.daemon
    loop = new_event_loop()
    loop.close()


def test_a_result_that_does_not_come_cancels_the_work() -> None:
    cancelled = threading.Event()

    async def never() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cancelled.set()

    with pytest.raises(TimedOutError):
        io_thread().run(never(), 0.01)
    assert cancelled.wait(20)


def test_an_interrupt_cancels_the_work_that_is_waited_for() -> None:
    cancelled, interrupted = threading.Event(), threading.Event()
    waiting = threading.get_ident()

    def interrupt(number: int, frame: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    async def interrupts() -> None:
        try:
            while True:  # a signal just before the wait does not end it
                signal.pthread_kill(waiting, signal.SIGUSR1)
                await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.05)
        finally:
            cancelled.set()

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            io_thread().run(interrupts())
        assert cancelled.wait(20)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_time_limit_within_the_work_is_an_error_of_the_work() -> None:
    async def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        io_thread().run(late(), 20)

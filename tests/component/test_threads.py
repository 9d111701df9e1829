"""The pool of threads: results, errors, cancellation that waits, a close that finishes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from memq.errors import ClosedError
from memq.runtime.threads import SpareThreads, ThreadPool

WAIT_S = 60


def join_left_threads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("memq-test"):
            thread.join(WAIT_S)


def test_results_and_errors_come_back() -> None:
    def divide(by: int, *, of: int = 6) -> float:
        return of / by

    async def scenario() -> None:
        pool = ThreadPool("test", 2)
        assert await pool.run(divide, 3) == 2
        assert await pool.run(divide, 2, of=4) == 2
        with pytest.raises(ZeroDivisionError):
            await pool.run(divide, 0)
        assert await pool.run(threading.get_ident) != threading.get_ident()
        await pool.close()

    asyncio.run(scenario())


def test_a_cancelled_call_that_runs_is_waited_for_and_one_that_waits_is_not() -> None:
    go = threading.Event()
    ran: list[int] = []

    async def scenario() -> None:
        pool = ThreadPool("test", 1)
        loop = asyncio.get_running_loop()
        inside = asyncio.Event()

        def block() -> None:
            loop.call_soon_threadsafe(inside.set)
            go.wait()
            ran.append(1)

        running = asyncio.create_task(pool.run(block))
        await inside.wait()
        waiting = asyncio.create_task(pool.run(ran.append, 2))
        await asyncio.sleep(0)
        for _ in range(3):
            running.cancel()
            waiting.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not running.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ran == [1]
        await pool.close()

    asyncio.run(scenario())


def test_a_timeout_around_a_call_that_runs_waits_for_it() -> None:
    go = threading.Event()

    async def scenario() -> None:
        pool = ThreadPool("test", 1)
        asyncio.get_running_loop().call_later(0.02, go.set)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await pool.run(go.wait)
        assert go.is_set()
        await pool.close()

    asyncio.run(scenario())


def test_closing_waits_for_calls_also_when_it_is_cancelled() -> None:
    go = threading.Event()

    async def scenario() -> None:
        pool = ThreadPool("test", 1)
        calls = [asyncio.create_task(pool.run(go.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0)
        with pytest.raises(ClosedError, match="test is closed"):
            await pool.run(print)
        closing.cancel()
        await asyncio.sleep(0)
        assert not closing.done()
        go.set()
        assert await asyncio.gather(*calls) == [True] * 3
        with pytest.raises(asyncio.CancelledError):
            await closing
        await pool.close()

    asyncio.run(scenario())


def test_a_second_close_does_not_wait_for_a_call_that_the_first_one_left_behind() -> None:
    go = threading.Event()

    async def scenario() -> None:
        pool = ThreadPool("test", 1)
        call = asyncio.create_task(pool.run(go.wait))
        await asyncio.sleep(0)
        assert not await pool.close(within_s=0.01)
        async with asyncio.timeout(60):
            assert not await pool.close()
            assert not await pool.close(within_s=0.01)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(scenario())
    join_left_threads()


def test_a_second_close_waits_for_the_last_call_of_the_first_one_without_blocking_the_loop() -> None:
    go = threading.Event()

    async def scenario() -> None:
        pool = ThreadPool("test", 1)
        first = asyncio.create_task(pool.close(lambda: go.wait(WAIT_S), WAIT_S))
        await asyncio.sleep(0)
        second = asyncio.create_task(pool.close())
        await asyncio.sleep(0)
        assert not go.is_set()
        assert not second.done()
        go.set()
        assert all(await asyncio.gather(first, second))

    asyncio.run(scenario())


def test_a_close_does_not_wait_for_a_call_that_another_one_leaves_behind_meanwhile() -> None:
    go = threading.Event()

    async def scenario() -> None:
        pool = ThreadPool("test", 1)
        call = asyncio.create_task(pool.run(go.wait, WAIT_S))
        await asyncio.sleep(0)
        assert not any(await asyncio.gather(pool.close(within_s=0.01), pool.close()))
        assert not go.is_set()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(scenario())
    join_left_threads()


# A thread that is not threading's is known by its frame alone, as a library's is. Processes of their own: the runner of
# the tests has such threads too.
VISIT = """
import _thread, threading
import memq.runtime.threads as threads

threads._LEAVE_CHECKS_MAX = 1_000_000
inside, leave = threading.Event(), threading.Event()
_thread.start_new_thread(lambda: (inside.set(), leave.wait()), ())
assert inside.wait(60)
end = threading.Thread(target=threads.wait_for_native_threads)
end.start()
end.join(0.1)
print(end.is_alive())
leave.set()
end.join(60)
print(end.is_alive())
"""
TWO_STORES = """
import memq.runtime.threads as threads

threads.wait_for_native_threads = lambda: print("waited")
threads.expect_native_threads()
threads.expect_native_threads()
print("done")
"""


def test_spare_threads_take_what_they_can_and_leave_the_rest_to_the_caller() -> None:
    spare, go_on, done = SpareThreads("test", 2), threading.Event(), threading.Semaphore(0)

    def work(number: int) -> None:
        go_on.wait(WAIT_S)
        done.release()

    assert [spare.offer(work, number) for number in range(4)] == [True, True, False, False]
    go_on.set()
    assert done.acquire(timeout=WAIT_S)
    while not spare.offer(work, 5):  # the thread is idle a moment after its call
        pass
    spare.close(wait=False)
    spare.close(wait=True)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("memq-test_")]
    for _ in range(2):
        assert done.acquire(blocking=False), "what was taken is done, also behind the close"
    assert not spare.offer(work, 6)
    assert not SpareThreads("none", 0).offer(work, 7)


@pytest.mark.parametrize(("program", "printed"), [(VISIT, ["True", "False"]), (TWO_STORES, ["done", "waited"])])
def test_the_process_does_not_end_while_a_native_thread_is_inside_python(program: str, printed: list[str]) -> None:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.split() == printed


def test_a_close_with_a_limit_leaves_behind_what_does_not_return() -> None:
    go, ran = threading.Event(), list[int]()

    async def scenario() -> None:
        pool = ThreadPool("test", 1)
        running = asyncio.create_task(pool.run(go.wait))
        await asyncio.sleep(0)
        assert not await pool.close(lambda: ran.append(1), within_s=0.01)
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(ClosedError):
            await pool.run(ran.append, 2)
        go.set()

    asyncio.run(scenario())
    for thread in threading.enumerate():
        if thread.name.startswith("memq-test"):
            thread.join(WAIT_S)
    assert ran == [], "the last call had no thread"


def test_the_last_call_of_a_close_is_waited_for() -> None:
    ran = list[int]()

    async def scenario() -> None:
        pool = ThreadPool("test", 1)
        assert await pool.close(lambda: ran.append(1), within_s=WAIT_S)
        assert await pool.close(lambda: ran.append(2), within_s=WAIT_S), "closing twice is fine"

    asyncio.run(scenario())
    assert ran == [1]

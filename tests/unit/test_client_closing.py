"""The end of clients: of `with` and `async with`, where the program's own error is the one to see, and by a fork."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from memq.client.admin import Admin, AsyncAdmin
from memq.client.io_thread import io_thread
from memq.client.lifecycle import Background
from memq.client.listener.listener import AsyncListener, Listener
from memq.errors import ForkedError, InvalidRequestError, MemqError, QueueError, TimedOutError


@pytest.mark.parametrize("own", [None, QueueError("the program's own")])
@pytest.mark.parametrize("blocking", [False, True])
def test_an_error_of_the_close_does_not_hide_the_programs_own(
    monkeypatch: pytest.MonkeyPatch, own: MemqError | None, *, blocking: bool
) -> None:
    async def fail(self: AsyncAdmin) -> None:
        raise TimedOutError("the connection does not end")

    async def awaited() -> None:
        async with AsyncAdmin("127.0.0.1:1"):
            if own is not None:
                raise own

    def blocked() -> None:
        with Admin("127.0.0.1:1"):
            if own is not None:
                raise own

    monkeypatch.setattr(AsyncAdmin, "close", fail)
    use = blocked if blocking else lambda: asyncio.run(awaited())
    with pytest.raises(MemqError) as caught:
        use()
    assert str(caught.value) == ("the connection does not end" if own is None else "the program's own")


def test_a_client_of_the_parent_is_refused_in_a_child_without_a_warning() -> None:
    with Admin("127.0.0.1:1") as admin:
        background = io_thread().clients()[-1]
        assert isinstance(background, Background)
        background.forked()  # as in a child
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with pytest.raises(ForkedError, match="this admin was created before fork"):
                admin.topics()
        assert warned == [], "the coroutine that is not awaited is closed"
        background.was_forked = False


def test_a_listener_of_the_parent_is_refused_in_a_child() -> None:
    with Listener("127.0.0.1:1", "orders", "billing", print, audit=False) as listener:
        background = io_thread().clients()[-1]
        assert isinstance(background, Background)
        background.forked()  # as in a child
        for use in (listener.stats, listener.stop, listener.start):
            with pytest.raises(ForkedError, match="this listener was created before fork"):
                use()
        background.was_forked = False


@pytest.mark.parametrize("use", [AsyncListener.run, AsyncListener.start])
def test_a_listener_of_another_event_loop_connects_to_no_broker(
    use: Callable[[AsyncListener], Coroutine[Any, Any, None]],
) -> None:
    listener = AsyncListener("127.0.0.1:1", "orders", "billing", print, audit=False)

    async def first_use() -> None:
        await listener.__aenter__()

    asyncio.run(first_use())
    with pytest.raises(InvalidRequestError, match="belongs to the event loop of its first use"):
        asyncio.run(use(listener))


def test_a_forgotten_client_whose_close_fails_is_no_longer_known(monkeypatch: pytest.MonkeyPatch) -> None:
    before = io_thread().clients()
    unread: list[object] = []
    closed = threading.Event()

    async def fail(self: AsyncAdmin) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unread.append(context))
        asyncio.get_running_loop().call_soon(closed.set)
        raise TimedOutError("the connection does not end")

    monkeypatch.setattr(AsyncAdmin, "close", fail)
    admin = Admin("127.0.0.1:1")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del admin
        gc.collect()
    assert [each.category for each in warned] == [ResourceWarning]
    assert closed.wait(20)

    async def settled() -> None:
        gc.collect()
        asyncio.get_running_loop().set_exception_handler(None)

    io_thread().run(settled())
    assert io_thread().clients() == before
    assert unread == [], "nobody is left to read the error"

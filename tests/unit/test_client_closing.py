"""The end of `with` and `async with`: the program's own error is the one to see."""

from __future__ import annotations

import asyncio

import pytest

from memq.client.admin import Admin, AsyncAdmin
from memq.errors import MemqError, QueueError, TimedOutError


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

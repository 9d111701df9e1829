"""Owners that continue while their log is cut, and another owner fills it again."""

from __future__ import annotations

import msgspec
import pytest

from memq.broker.partition.ownership import Phase
from memq.errors import LogCutError
from memq.format.pointer import encode_pointer
from memq.notification import Entry
from tests.brokers import log_lines, run
from tests.partition_owners import READ, Owner, foreign


def land(owner: Owner, body: bytes) -> None:
    """Let a pointer of another owner land at the end of the log."""
    log = owner.queue.log(READ)
    log.entries.append(Entry(log.end, owner.clock.wall_ms(), body))


def opened(owner: Owner, epoch: int) -> bytes:
    """Return an `opened` of the owner's partition."""
    pointer = msgspec.structs.replace(owner.batch(), kind="opened", epoch=epoch, locations=(), producers=(), records=0)
    return encode_pointer(pointer)


def test_an_owner_that_finds_another_pointer_at_the_offset_of_its_own_gives_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would pass over the `opened` of the next owner, and publish and ack in its old epoch."""

    async def work() -> None:
        owner = Owner()
        owner.own.become(Phase.OWNING)
        await owner.queue.create([READ], 30_000)
        assert await owner.publisher.publish(owner.batch, 0)
        log = owner.queue.log(READ)
        land(owner, foreign(owner).body)  # so the next own pointer does not follow on the known end
        assert await owner.publisher.publish(owner.batch, 1)
        del log.entries[1:]
        land(owner, foreign(owner).body)
        land(owner, opened(owner, 2))
        with pytest.raises(LogCutError):
            await owner.publisher.publish(owner.batch, 2)
        assert owner.own.phase is Phase.FENCED
        assert len(log.entries) == 3, "nothing was published"

    run(work())
    (line,) = log_lines(caplog)
    assert line.startswith("log-lost: topic 'clicks' partition 0: the queue shows another pointer at offset 2")

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


@pytest.mark.parametrize("lands", [0, 1], ids=["exactly up to its known end", "beyond its known end"])
def test_an_owner_whose_log_was_filled_again_notices_that_its_last_entry_changed(
    caplog: pytest.LogCaptureFixture, lands: int
) -> None:
    """The `opened` of the next owner is below the end that this owner knows: it would read on from there."""

    async def work() -> None:
        owner = Owner()
        owner.own.become(Phase.OWNING)
        await owner.queue.create([READ], 30_000)
        for number in range(3):
            assert await owner.publisher.publish(owner.batch, number)
        log = owner.queue.log(READ)
        del log.entries[1:]
        for _ in range(2 + lands):  # it repeats its `opened`
            land(owner, opened(owner, 2))
        end = log.end
        owner.clock.advance(10_000)  # a third of S, and the time of the last publish
        with pytest.raises(LogCutError):
            await owner.publisher.publish(owner.batch, 3)
        assert owner.own.log_was_cut
        assert owner.own.phase is Phase.FENCED
        assert log.end == end, "nothing was published"

    run(work())
    (line,) = log_lines(caplog)
    assert line.startswith("log-lost: topic 'clicks' partition 0: the queue shows another pointer at offset 2")


def test_an_owner_whose_last_entry_retention_has_removed_continues() -> None:
    async def work() -> None:
        owner = Owner()
        await owner.queue.create([READ], 30_000)
        assert await owner.publisher.publish(owner.batch, 0)
        await owner.queue.trim(READ, 1)
        owner.clock.advance(10_000)
        assert await owner.publisher.publish(owner.batch, 1)
        assert owner.queue.log(READ).end == 2

    run(work())

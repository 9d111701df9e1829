"""One partition whose log or objects fail or hang for a while."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from memq.errors import InvalidRequestError, QueueError, StoreError
from memq.format.key import ObjectKey, parse_object_key
from memq.topic import ReadPartition

HANG_S = 40.0  # longer than any caller waits
RECOVERY_S = 60.0  # for the log's own partition: a call that hangs, and the back-offs after it


@dataclass(slots=True)
class FailingPartition:
    """The log or the objects of partition `number`: calls fail, or hang, until `until_s` (virtual)."""

    number: int = -1
    service: str = "queue"
    until_s: float = 0.0
    hangs: bool = False
    healthy_s: dict[int, float] = field(default_factory=dict)  # when its users must have recovered
    log_until_s: dict[int, float] = field(default_factory=dict)  # end of the last sickness of each log

    def fail_until(self, number: int, until_s: float, *, service: str, hangs: bool) -> None:
        """Begin a sickness of one part until `until_s`."""
        self.number, self.until_s, self.service, self.hangs = number, until_s, service, hangs
        self.healthy_s[number] = until_s + RECOVERY_S
        if service == "queue":
            self.log_until_s[number] = until_s

    def did_log_fail(self, number: int, since_s: float) -> bool:
        """Return whether the log of a partition failed at or after `since_s`."""
        return self.log_until_s.get(number, 0.0) >= since_s

    async def reach_log(self, partition: ReadPartition, now_s: float) -> None:
        """Raise QueueError while the log of the partition fails."""
        if self.service == "queue" and partition.partition == self.number and now_s < self.until_s:
            await self._hang()
            raise QueueError(f"the log of {partition.topic}/{partition.partition} fails")

    async def reach_object(self, key: str, now_s: float) -> None:
        """Raise StoreError while the objects of its partition fail."""
        if self.service != "store" or now_s >= self.until_s:
            return
        try:
            found = parse_object_key(key)
        except InvalidRequestError:
            return
        if isinstance(found, ObjectKey) and found.partition == self.number:
            await self._hang()
            raise StoreError(f"object '{key}' is in a part of the store that fails")

    async def _hang(self) -> None:
        if self.hangs:
            await asyncio.sleep(HANG_S)

"""One source partition on its way into one write partition: its plan, its cut, its writer."""

from __future__ import annotations

from memq.client.bulk.block_cutter import Cutter
from memq.client.bulk.copier import FixedIdentityWriter
from memq.client.bulk.import_plan import encode_plan
from memq.client.bulk.import_progress import ImportProgress
from memq.client.producer.fields import RecordFields
from memq.errors import TooLargeError
from memq.notification.kafka.admin import Place
from memq.notification.kafka.reading.source import SourceRecord


class PartitionImport:
    """`end`: of the plan that is being fulfilled; `last_end`: where this run stops."""

    def __init__(
        self,
        place: Place,
        imported: ImportProgress,
        copier: FixedIdentityWriter,
        target: str,
        end: int,
        last_end: int,
    ) -> None:
        self.place = place
        self.imported = imported
        self.copier = copier
        self.end = end
        self.last_end = last_end
        self.begin = copier.acked
        self.records = 0
        self.reached = copier.acked >= end  # the plan's end was met in the source
        self._cutter = Cutter(target, place[1])

    @property
    def position(self) -> tuple[int, str]:
        """The stored state of a copy: its confirmed progress, and its plan."""
        return self.copier.acked, encode_plan(self.end)

    @property
    def done(self) -> bool:
        """Whether nothing is left to read."""
        return self.reached and self.end >= self.last_end

    async def take(self, record: SourceRecord, record_bytes_max: int) -> None:
        """Take the next record. Raises: TooLargeError; what became of earlier blocks."""
        if self.reached:
            return
        if record.offset >= self.end:
            self.reached = True
            return
        fields = RecordFields(record.value, record.key, record.headers, record.timestamp_ms, None)
        size = fields.size
        if size > record_bytes_max:
            raise TooLargeError(
                f"record {record.offset} of partition {self.place[1]} of Kafka topic '{self.place[0]}' has "
                f"{size} bytes, record_bytes_max of the topic is {record_bytes_max}",
                hint="memq topic alter TOPIC --set record_bytes_max=…, then start the import again",
            )
        self.records += 1
        cut = self._cutter.add(record.offset, fields, size)
        if cut is not None:
            await self.copier.put(cut)

    def meet_end(self, offset: int) -> None:
        """Take the news that nothing lies before `offset` any more."""
        self.reached = self.reached or offset >= self.end

    async def finish(self) -> None:
        """Have all of the plan acked."""
        cut = self._cutter.end()
        if cut is not None:
            await self.copier.put(cut)
        await self.copier.drain()
        self.copier.acked = max(self.copier.acked, self.end)  # what lies between are no records

    def renew(self) -> None:
        """Begin the plan of this run, when that of an earlier one is fulfilled."""
        self.end, self.reached = self.last_end, False

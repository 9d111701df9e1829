"""Where the blocks of pop groups are: their pointers say it, as compaction may have moved them."""

from __future__ import annotations

from collections import OrderedDict

from memq.broker.services import Services
from memq.errors import NotFoundError, NotReadyError
from memq.format.pointer import Location, Pointer, pointer_mark, read_pointer
from memq.queues.block import QueueBlock
from memq.queues.payloads import Place
from memq.queues.pop.groups import PopPlace, place_of
from memq.topic import ReadPartition

KNOWN_MAX = 1_000  # pointers whose locations are kept


class TopicPlaces:
    """See `memq.queues.payloads.StreamPlaces`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._known: OrderedDict[tuple[ReadPartition, PopPlace], tuple[Location, ...]] = OrderedDict()

    async def find(self, block: QueueBlock, *, again: bool = False) -> Place:
        """Return where a block is now. Raises: NotReadyError; as the queue."""
        place = place_of(block.key)
        log = place.read_partition(block.target)
        locations = None if again else self._known.get((log, place))
        if locations is None:
            locations = self._known[log, place] = (await self._pointer(log, place)).locations
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
        for location in locations:
            store = self._services.stores.get(location.store)
            if store is not None:
                return Place(store, location.key, location.offset + block.block.offset)
        raise NotReadyError(f"offset {place.offset} of {log} is in no store of this broker")

    async def _pointer(self, log: ReadPartition, place: PopPlace) -> Pointer:
        """Return the pointer of a place. Raises: NotReadyError if it is gone, or another one."""
        try:
            entries = await self._services.pointers.read(log, place.offset, 1)
        except NotFoundError as error:
            raise NotReadyError(f"{log} is gone: its items end soon") from error
        found = entries[0] if entries else None
        pointer = read_pointer(found.body, newer="raise") if found is not None else None
        if found is None or found.offset != place.offset or not isinstance(pointer, Pointer):
            raise NotReadyError(f"{log} has no pointer at {place.offset}: its items end soon")
        if pointer_mark(pointer) != place.mark:
            raise NotReadyError(f"{log} has another pointer at {place.offset}: its records are read again")
        return pointer

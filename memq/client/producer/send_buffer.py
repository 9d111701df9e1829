"""The caller's side of a producer: records go into open blocks; blocks are cut and sealed.

Thread-safe by one lock; no I/O, no event loop. The I/O side takes the blocks that were cut, and returns memory when
blocks are settled. It is woken once for many records: a wake costs 5 us, a record 0.1 us.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from memq.client.producer.delivery import AsyncDelivery, Delivery
from memq.client.producer.fields import RecordColumns, RecordFields, check_size, check_sizes, encrypted_fields
from memq.client.producer.open_block import Gate, OpenBlock, PartitionBuffer, PendingBlock, Route, native
from memq.client.producer.settings import ProducerSettings
from memq.errors import BufferFullError, InvalidRequestError, MemqError, TooLargeError
from memq.format.blocks.builder import BlockBuilder
from memq.kernel.rows import KEYED, PLAIN, ROW_COSTS, TIMED, Lane, Rows
from memq.limits import KIB, SEQUENCE_END, TIME_MS_END
from memq.runtime.process import keep_freed_blocks
from memq.runtime.runtime import Runtime
from memq.topic import Topic

FIRST_LIMIT_BYTES = 8 * KIB
BLOCK_COST_BYTES = 1 * KIB  # memory of a pending block in addition to its bytes: objects, queues, deliveries
ASIDE_BYTES_MIN = 64 * KIB  # smaller blocks gain nothing: waking a thread takes 20 us, compressing this much 100 us
_TIME_MS_LEAST = -TIME_MS_END
_ROW = 24  # bound on the memory of a row, or of a header, in the columns
_CHUNK_RECORDS = 2_048  # records that are measured at once: their lengths stay in the CPU cache
_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()  # the lock-free path in Python needs the GIL
_Delivery = Delivery | AsyncDelivery


class SendBuffer:
    """Open blocks, cut blocks and the memory they claim.

    `lanes` are the lock-free paths into open blocks, by topic; `memq.kernel.rows` has their rule.
    `aside` gets a function that seals, and a block; it returns whether another thread seals it. None: callers seal.
    """

    def __init__(
        self,
        settings: ProducerSettings,
        runtime: Runtime,
        producer_id: int,
        make_delivery: Callable[[], _Delivery],
        wake: Callable[[], None],
        room_made: Callable[[], None],
    ) -> None:
        keep_freed_blocks()
        self.lock = threading.Lock()
        self.lanes: dict[str, Lane] = {}
        self.pending_bytes = 0
        self.waiting = 0  # number of callers that wait for room; while it is above 0, `room_made` is called
        self.releases = 0  # number of times that memory was returned
        self.refusal: MemqError | None = None
        self.why_late: Callable[[], str] = str  # why acks are late, for the error of a full buffer
        self._settings = settings
        self._runtime = runtime
        self._producer_id = producer_id
        self._make_delivery = make_delivery
        self._wake = wake
        self._room_made = room_made
        self._routes: dict[str, Route] = {}
        self._buffers: dict[tuple[str, int], PartitionBuffer] = {}  # by topic id and partition: outlives its route
        self._dirty: list[PartitionBuffer] = []
        self._awake = False
        self.opened_blocks = 0
        self.aside: Callable[[Callable[[PendingBlock], None], PendingBlock], bool] | None = None
        self.starts: dict[tuple[str, int], tuple[int, int]] = {}  # by topic id and partition: see `PartitionBuffer`

    # ---- routes ------------------------------------------------------------------------------

    def route(self, topic: str) -> Route | None:
        """Return the route of a topic; None before its metadata arrived. Raises: ClosedError, ForkedError."""
        if self.refusal is not None:
            raise self.refusal
        try:
            return self._routes.get(topic)
        except (TypeError, ValueError):  # no hash, so no text: requesting its metadata raises the error
            return None

    def add_route(self, topic: Topic) -> Route:
        """Use a partition map from now on: of a new topic, or of one that was altered or created again."""
        cut: list[PendingBlock] = []
        with self.lock:
            known = self._routes.get(topic.name)
            if known is not None and known.topic == topic:
                return known
            self._set_lane(topic.name, None)
            route = self._routes[topic.name] = self._new_route(topic)
            if known is not None:
                known.current = False
                if known.topic.id == topic.id:
                    self._order_moved_slots(known, route, cut)
            self._set_lane(topic.name, route.lane)  # last: records on the lane need the gates
        self.seal(cut)
        return route

    def _set_lane(self, topic: str, lane: Lane | None) -> None:
        """Replace the lane of a topic; None: records of the topic need the lock."""
        known = self.lanes.pop(topic, None)
        if known is not None:
            known.end()
        if lane is not None:
            self.lanes[topic] = lane

    def _new_route(self, topic: Topic) -> Route:
        buffers = []
        for part in topic.taking:
            key = (topic.id, part.partition)
            if key not in self._buffers:
                slots = (part.slot_first, part.slot_last)
                start = self.starts.get(key, (0, 0))
                self._buffers[key] = PartitionBuffer(topic, part.partition, slots, start)
            buffers.append(self._buffers[key])
        turn = self._runtime.random.randrange(len(buffers))
        # The lock-free paths do not check the topic's bound, so each record that fits into a block must be below it.
        lockless = (native is not None or _GIL) and topic.settings.record_bytes_max >= self._settings.block_bytes
        return Route(topic, buffers, self._settings.delivery_timeout_s, turn, lockless=lockless)

    def _order_moved_slots(self, known: Route, route: Route, cut: list[PendingBlock]) -> None:
        """Keep the order of keys whose slots move: later records wait for the records put before the move.

        The open blocks of both partitions end here, so each block has records from before or after the move only. If
        slots move twice, later records wait for the blocks from before both moves.
        """
        gates: list[tuple[PartitionBuffer, PartitionBuffer, int]] = []
        for buffer, (first, last) in zip(route.buffers, route.map.slots, strict=True):
            for before, (low, high) in zip(known.buffers, known.map.slots, strict=True):
                if before is not buffer and low <= last and first <= high:
                    cut += [self._cut(each.open) for each in (before, buffer) if each.open is not None]
                    gates.append((buffer, before, before.next_sequence))
                    gates += [(buffer, each.before, each.below) for each in before.gates if each.before is not buffer]
        for buffer, before, below in gates:
            buffer.gates.append(Gate(buffer.next_sequence, before, below))
            before.followers.append(buffer)
        for buffer, slots in zip(route.buffers, route.map.slots, strict=True):
            buffer.slots = slots

    def drop_route(self, topic: str) -> None:
        """Forget a topic that no longer exists, so that the next record asks for it again."""
        with self.lock:
            self._routes.pop(topic, None)
            self._set_lane(topic, None)

    def refuse(self, error: MemqError) -> None:
        """Refuse all records from now on, with `error`."""
        with self.lock:
            self.refusal = error
            for topic in self._routes:
                self._set_lane(topic, None)
            self._routes.clear()
            self._wake_waiting()

    # ---- records -----------------------------------------------------------------------------

    def put_keyed(self, topic: str, value: bytes, key: bytes, timestamp_ms: int | None) -> _Delivery | None:
        """Add a record with a key on the lock-free path; None if the path is closed for the record."""
        try:
            lane = self.lanes.get(topic)
        except (TypeError, ValueError):  # as in `route`; calling `route` would cost a third of this path
            return None
        if lane is None:
            return None
        firsts = lane.firsts
        rows = lane.partitions[bisect_right(firsts, crc32(key) >> 16) - 1 if len(firsts) > 1 else 0].rows
        if rows is None:
            return None
        row: tuple[bytes, bytes] | tuple[bytes, bytes, int]
        if timestamp_ms is None:
            row = (value, key)
            if rows.shape != KEYED:
                return None
        else:
            row = (value, key, timestamp_ms)
            if rows.shape != TIMED or type(timestamp_ms) is not int or not _TIME_MS_LEAST < timestamp_ms < TIME_MS_END:
                return None
        room = rows.room - (len(value) + len(key) + rows.row_cost)
        if room < 0:
            return None
        rows.cells.extend(row)
        rows.room = room
        if not rows.closed and lane.current:
            return rows.delivery  # type: ignore[no-any-return]  # the kernel does not know its class
        return self.put_late(rows, row)

    def put_late(self, rows: Rows, row: tuple[object, ...]) -> _Delivery | None:
        """Return the delivery of a row added to a closed block in time; None if it must be put again.

        A row that a replaced lane added to an open block must be put again, too.
        """
        with self.lock:
            return None if rows.take_late(row) else rows.delivery

    def put(self, route: Route, fields: RecordFields, partition: int | None) -> _Delivery:
        """Add a record. Raises: TooLargeError, InvalidRequestError; BufferFullError without room now."""
        fields = encrypted_fields(fields, self._settings.encryption, route.topic)
        size = fields.size
        if size > route.record_bytes_max:
            check_size(size, route.topic)
        cut: list[PendingBlock] = []
        try:
            with self.lock:
                route = self._current(route)
                size += _ROW * (1 + len(fields.headers or ())) + len(fields.tag or "")
                if partition is not None:
                    buffer = route.buffers[route.map.index_of(partition)]
                elif fields.key is not None:
                    buffer = route.buffers[route.map.index_of_key(fields.key)]
                else:
                    buffer = self._keyless_buffer(route, size, cut)
                block = self._block_with_room(buffer, size, cut)
                try:
                    block.append(*fields)
                except MemqError:
                    self._drop_empty(block)
                    raise
                if partition is not None:
                    block.slots_hold = False
                self._show_rows(route, block, keyless=fields.key is None and partition is None)
                return block.delivery
        finally:
            self.seal(cut)

    def put_block(self, route: Route, partition: int, first: int, builder: BlockBuilder) -> _Delivery:
        """Seal these records, with sequences from `first`, as one block; only one caller may do so.

        Sequences must ascend.
        Raises: TooLargeError; BufferFullError when there is no room now: the records stay as they are.
        """
        with self.lock:
            if self.refusal is not None:
                raise self.refusal
            buffer = route.buffers[route.map.index_of(partition)]
            assert buffer.open is None, "blocks of two kinds in one partition"
            # acks are cumulative: a block below an acked one would never get its own ack
            assert first >= buffer.next_sequence, f"sequence {first} is below {buffer.next_sequence}"
            self._claim(builder.raw_bytes + BLOCK_COST_BYTES)
            buffer.next_sequence = first
            delivery, now_s = self._make_delivery(), self._runtime.clock.monotonic()
            pending = PendingBlock(builder, buffer, delivery, self._deadline_s(buffer, now_s), builder.raw_bytes)
            self._queue(pending)
        self.seal([pending])
        return delivery

    def put_many(self, route: Route, many: RecordColumns, delivered: list[Any]) -> RecordColumns | None:
        """Add records until the memory is full, and the deliveries of their blocks to `delivered`.

        Return the records that had no room, None if all had. Raises: TooLargeError, before any record is added.
        """
        rest = self._put_many_by(route, many, delivered)
        while rest is not None and not route.current:  # the partitions of the rest may have changed
            with self.lock:
                known, route = route, self._current(route)
            if known is route:
                break
            rest = self._put_many_by(route, rest, delivered)
        return rest

    def _put_many_by(self, route: Route, many: RecordColumns, delivered: list[Any]) -> RecordColumns | None:
        divided = many.keys is not None and len(route.buffers) > 1
        if divided or len(many.values) > _CHUNK_RECORDS:
            check_sizes(many, route.topic, _CHUNK_RECORDS)  # a single chunk is checked before any record is added
        if many.keys is None:
            done = self._put_column(route, None, many, delivered)
            rest = range(done, len(many.values))
        elif len(route.buffers) == 1:
            done = self._put_column(route, route.buffers[0], many, delivered)
            rest = range(done, len(many.values))
        else:
            return self._put_by_partition(route, many, many.keys, delivered)
        return many.pick(rest) if rest else None

    def _put_by_partition(
        self, route: Route, many: RecordColumns, keys: Sequence[bytes | None], delivered: list[Any]
    ) -> RecordColumns | None:
        """Add records with keys to their partitions, one partition after the other."""
        turn = route.turn  # records without a key go to one partition
        indexes = [turn if key is None else route.map.index_of_key(key) for key in keys]
        rest: list[int] = []
        for index in range(len(route.buffers)):
            numbers = [number for number, chosen in enumerate(indexes) if chosen == index]
            if numbers:
                done = self._put_column(route, route.buffers[index], many.pick(numbers), delivered)
                rest += numbers[done:]
        return many.pick(sorted(rest)) if rest else None

    def _put_column(
        self, route: Route, buffer: PartitionBuffer | None, many: RecordColumns, delivered: list[Any]
    ) -> int:
        """Add records to one partition, or to each in turn without a buffer; return how many had room."""
        done = 0
        while done < len(many.values):
            end = min(done + _CHUNK_RECORDS, len(many.values))
            sizes = many.sizes(done, end)
            if max(sizes) > route.record_bytes_max:
                check_sizes(many, route.topic, _CHUNK_RECORDS)
            taken = self._put_chunk(route, buffer, many, done, sizes, delivered)
            done += taken
            if taken < len(sizes):
                break
        return done

    def _put_chunk(
        self,
        route: Route,
        buffer: PartitionBuffer | None,
        many: RecordColumns,
        start: int,
        sizes: list[int],
        delivered: list[Any],
    ) -> int:
        """Add the records from `start` on, whose sizes are `sizes` (bytes); return how many had room."""
        plain = many.keys is None and many.timestamps_ms is None and many.tag is None
        row = ROW_COSTS[PLAIN] if plain else _ROW
        cut: list[PendingBlock] = []
        done, count, left = 0, len(sizes), sum(sizes) + row * len(sizes)
        try:
            with self.lock:
                if buffer is not None and not route.current:
                    return 0
                route = self._current(route)
                while done < count:
                    target = buffer or self._keyless_buffer(route, sizes[done] + row, cut)
                    block = self._block_with_room(target, sizes[done] + row, cut, left)
                    fits, size = _prefix(sizes, done, row, left, block.limit - block.raw_bytes)
                    try:
                        block.append_many(*many.part(start + done, start + done + fits), size)
                    except MemqError:
                        self._drop_empty(block)
                        raise
                    if not delivered or delivered[-1] is not block.delivery:
                        delivered.append(block.delivery)
                    self._show_rows(route, block, keyless=buffer is None)
                    done += fits
                    left -= size + row * fits
        except BufferFullError:
            return done
        finally:
            self.seal(cut)
        return done

    def full_error(self) -> BufferFullError:
        """Return the error for a caller that does not wait for room."""
        text, why = f"{self.pending_bytes} of {self._settings.pending_bytes_max} bytes are pending", self.why_late()
        return BufferFullError(f"{text}: {why}" if why else text)

    def _keyless_buffer(self, route: Route, size: int, cut: list[PendingBlock]) -> PartitionBuffer:
        """Return the partition for keyless records: the next one after each full block."""
        block = route.sticky
        if block is not None and block.count and block.raw_bytes + size > max(block.limit, self._settings.block_bytes):
            cut.append(self._cut(block))
        return route.sticky.buffer if route.sticky is not None else route.next_turn()

    def _show_rows(self, route: Route, block: OpenBlock, *, keyless: bool) -> None:
        """Make the block the one for keyless records, and open the lock-free paths into its rows."""
        if keyless:
            route.sticky = block
        block.buffer.open_rows.rows = block.rows
        if route.lane is not None and route.sticky is block:
            route.lane.keyless = block.rows if block.shape == PLAIN else None

    def _current(self, route: Route) -> Route:
        """Return the present route of the topic: it may have changed before the lock was acquired."""
        return route if route.current else self._routes.get(route.topic.name, route)

    # ---- blocks ------------------------------------------------------------------------------

    def _block_with_room(self, buffer: PartitionBuffer, size: int, cut: list[PendingBlock], wish: int = 0) -> OpenBlock:
        """Return a partition's open block with room for `size` bytes, and for up to `wish` if cheap.

        This is the present block, perhaps grown, or a new one. A column that is new to a block widens its older rows.
        That may exceed the block's limit by a part, but never the bounds of the format, which are 16 times larger.
        """
        if self.refusal is not None:
            raise self.refusal
        block = buffer.open
        if block is not None:
            if self._grow(block, block.raw_bytes + size, block.raw_bytes + wish):
                return block
            cut.append(self._cut(block))
        most = self._settings.block_bytes
        # A larger record gets a block of its own, up to the bound of the format.
        limit = size if size > most else max(size + KIB, min(most, max(FIRST_LIMIT_BYTES, wish + KIB)))
        if self.pending_bytes + buffer.first_limit <= self._settings.pending_bytes_max // 2:
            limit = max(limit, buffer.first_limit)
        self._claim(limit + buffer.front_bytes(limit) + BLOCK_COST_BYTES)
        delivery, now_s = self._make_delivery(), self._runtime.clock.monotonic()
        new = buffer.open = OpenBlock(buffer, delivery, limit, now_s)
        self.opened_blocks += 1
        if not buffer.cut:  # otherwise the seal wakes the I/O side: one wake less for each full block
            self._mark_dirty(buffer)
        return new

    def _drop_empty(self, block: OpenBlock) -> None:
        """Drop a block whose first record was refused; the I/O side ignores the partition."""
        block.close()
        if block.count:
            return
        self._hide_rows(block)
        block.buffer.open = None
        self.pending_bytes -= block.claimed + BLOCK_COST_BYTES

    def _hide_rows(self, block: OpenBlock) -> None:
        """Let no more records go to a block: it is closed."""
        block.buffer.open_rows.rows = None
        route = self._routes.get(block.buffer.topic.name)
        if route is not None and route.sticky is block:
            route.sticky = None
            if route.lane is not None:
                route.lane.keyless = None

    def _grow(self, block: OpenBlock, needed: int, wished: int) -> bool:
        """Double the block's limit until it suffices; return False if the block is full (`block_bytes`)."""
        most = self._settings.block_bytes
        if needed <= block.limit <= most + KIB:
            return True
        if needed > most:
            return False
        limit = min(most, max(block.limit * 2, needed, wished))
        self._claim(limit - block.limit)
        block.grow(limit)
        return True

    def _claim(self, count: int) -> None:
        if count > self._settings.pending_bytes_max:
            raise TooLargeError(f"{count} bytes are over pending_bytes_max = {self._settings.pending_bytes_max}")
        if self.pending_bytes + count > self._settings.pending_bytes_max:
            raise self.full_error()
        self.pending_bytes += count

    def _cut(self, block: OpenBlock) -> PendingBlock:
        """Close an open block, which fixes its sequences and its order in the partition."""
        block.close()
        self._hide_rows(block)
        buffer = block.buffer
        buffer.first_limit = min(block.raw_bytes * 5 // 4, self._settings.block_bytes)
        buffer.open = None
        pending = PendingBlock(block, buffer, block.delivery, self._deadline_s(buffer, block.opened_s), block.claimed)
        if block.slots_hold:
            pending.slots = buffer.slots
        self._queue(pending)
        return pending

    def _deadline_s(self, buffer: PartitionBuffer, opened_s: float) -> float:
        route = self._routes.get(buffer.topic.name)
        return opened_s + (route.delivery_timeout_s if route is not None else self._settings.delivery_timeout_s)

    def _queue(self, pending: PendingBlock) -> None:
        """Append a block to the queue of its partition."""
        buffer = pending.buffer
        buffer.next_sequence = pending.next
        assert buffer.next_sequence < SEQUENCE_END
        buffer.unsettled[pending.first] = None
        buffer.cut.append(pending)

    def seal(self, cut: list[PendingBlock]) -> None:
        """Seal blocks that were cut, without the lock, so that several threads compress at once.

        If a sealing thread is idle, it seals a large block, and the caller fills the next block meanwhile.
        """
        for number, pending in enumerate(cut):
            try:
                if self.aside is None or pending.claimed < ASIDE_BYTES_MIN or not self.aside(self._seal, pending):
                    self._seal(pending)
            except BaseException:  # Ctrl-C in the caller's thread: the other blocks must be sealed, too
                self.seal(cut[number + 1 :])
                raise

    def _seal(self, pending: PendingBlock) -> None:
        held = 0
        try:
            sealed = pending.seal(self._settings, self._producer_id, self._runtime.clock.wall_ms())
            pending.data, held = sealed.data, sealed.memory_bytes
        except MemqError as error:
            pending.error = error
        except Exception as error:  # noqa: BLE001  # only this block fails, with its cause
            pending.error = InvalidRequestError(
                f"block of {pending.next - pending.first} records can't be sealed: {error!r}"
            )
            pending.error.__cause__ = error
        except BaseException as error:
            pending.error = InvalidRequestError(f"the seal of a block was interrupted: {error!r}")
            raise
        finally:
            with self.lock:
                self.pending_bytes += held - pending.claimed
                pending.claimed = held
                pending.ready = True
                self._mark_dirty(pending.buffer)
                self._wake_waiting()

    # ---- the I/O side ------------------------------------------------------------------------

    def take_dirty(self) -> list[PartitionBuffer]:
        """Return the partitions that were marked since the last call."""
        with self.lock:
            dirty, self._dirty = self._dirty, []
            self._awake = False
            for buffer in dirty:
                buffer.dirty = False
        return dirty

    def take_ready(self, buffer: PartitionBuffer) -> list[PendingBlock]:
        """Return the sealed blocks of a partition in order, up to the first unsealed or held-back one."""
        ready: list[PendingBlock] = []
        with self.lock:
            while buffer.cut and buffer.cut[0].ready and not (buffer.gates and buffer.holds_back(buffer.cut[0].first)):
                ready.append(buffer.cut.popleft())
        return ready

    def seal_open(self, buffer: PartitionBuffer) -> None:
        """Cut and seal the open block of a partition, if it has one."""
        with self.lock:
            if buffer.open is None or not buffer.open.count:
                return
            cut = [self._cut(buffer.open)]
        self.seal(cut)

    def release(self, pending: PendingBlock) -> None:
        """Return the memory of a settled block."""
        with self.lock:
            self.pending_bytes -= pending.claimed + BLOCK_COST_BYTES
            pending.buffer.unsettled.pop(pending.first, None)
            for follower in pending.buffer.followers:
                self._mark_dirty(follower)
            self._wake_waiting()

    def claim(self, count: int) -> None:
        """Claim memory for a delayed record. Raises: TooLargeError, BufferFullError, ClosedError."""
        with self.lock:
            if self.refusal is not None:
                raise self.refusal
            self._claim(count)

    def give_back(self, count: int) -> None:
        """Return the memory of a delayed record."""
        with self.lock:
            self.pending_bytes -= count
            self._wake_waiting()

    def unsettled(self) -> list[tuple[_Delivery, int]]:
        """Return delivery and number of records of each block that no window has yet."""
        found: list[tuple[_Delivery, int]] = []
        with self.lock:
            for buffer in self._buffers.values():
                found += [(pending.delivery, pending.next - pending.first) for pending in buffer.cut]
                if buffer.open is not None and buffer.open.count:
                    found.append((buffer.open.delivery, buffer.open.count))
        return found

    def buffers(self) -> list[PartitionBuffer]:
        """Return the partitions of all routes, replaced ones included."""
        with self.lock:
            return list(self._buffers.values())

    def _mark_dirty(self, buffer: PartitionBuffer) -> None:
        if not buffer.dirty:
            buffer.dirty = True
            self._dirty.append(buffer)
        if not self._awake:
            self._awake = True
            self._wake()

    def _wake_waiting(self) -> None:
        self.releases += 1
        if self.waiting:
            self._room_made()


def _prefix(sizes: list[int], done: int, row: int, left: int, room: int) -> tuple[int, int]:
    """Return how many of `sizes[done:]` fit into `room` (at least one), and their sum.

    `left` is the sum of `sizes[done:]` with `row` bytes for each. Guessing by the mean and checking cost 6 ns a record;
    running totals with a search cost 40 ns.
    """
    count = len(sizes) - done
    if left <= room:
        return count, left - row * count
    fits = int(count * room * 0.98 / left)
    while fits > 1:
        size = sum(sizes[done : done + fits])
        if size + row * fits <= room:
            return fits, size
        fits //= 2
    return 1, sizes[done]

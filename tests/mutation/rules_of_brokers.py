"""Patches that break a rule of the broker: the ring, ownership, opening, publishing, forwarding and the spool."""

from __future__ import annotations

RING = "memq/broker/partition/ring.py"
PUBLISHING = "memq/broker/partition/publishing.py"
OWNERSHIP = "memq/broker/partition/ownership.py"
OPENING = "memq/broker/partition/opening.py"
PROCESSOR = "memq/broker/partition/topic_processor.py"
APPENDER = "memq/broker/partition/appender.py"
KNOWN = "memq/broker/partition/known_blocks.py"
HELD = "memq/broker/spool/unpublished_blocks.py"
FORWARDING = "memq/broker/spool/forwarding.py"
WRITER = "memq/broker/spool/writer.py"
SEGMENTS = "memq/broker/spool/segments.py"
REPLAY = "memq/broker/spool/replay.py"
STORING = "memq/broker/partition/storing.py"
BATCH = "memq/broker/partition/batch.py"
SLABS = "memq/broker/ingest/slabs.py"
FRAMES = "memq/broker/ingest/connection.py"
BLOCKS = "memq/kernel/blocks_pure_python.py"
FRESH = "memq/broker/partition/recent_pointer_cache.py"
POLLS = "memq/broker/api/reader_requests.py"
HEADERS = "memq/kernel/header_table.py"

APPEND = "        await disk.append(segment.name, buffers)\n"
MOVE = "        for ticket, spans in moves:\n            ticket.move(segment, spans)\n"

# path, the rule that is broken, the text, what comes in its place
BROKER_RULES: tuple[tuple[str, str, str, str], ...] = (
    (
        PROCESSOR,
        "a drain publishes `closed` in an epoch that has ended",
        " and self.failure is None and self.own.phase is Phase.OWNING:",
        " and self.failure is None:",
    ),
    (
        PROCESSOR,
        "pointers of an epoch that ended are answered from memory",
        "        self.services.recent_pointers.forget(self.read_partition)\n",
        "",
    ),
    (
        FRESH,
        "pointers of a log that was cut are answered from memory",
        "            self.forget(partition)\n        self._pointers",
        "            pass\n        self._pointers",
    ),
    (
        POLLS,
        "blocks take more memory than is free for answers",
        "if location.length > bytes_max:",
        "if location.length > POLL_BYTES_MAX:",
    ),
    (
        POLLS,
        "a read that confirms an answer is answered from memory, too",
        "            from_memory = ask.wait_ms > 0",
        "            from_memory = ask.wait_ms >= 0",
    ),
    (
        FRAMES,
        "a block on the stream of another partition is dropped while that stream is closed",
        "                    _check_beginning(stream, view[at + FRAME_PREFIX_BYTES : stop], length)\n",
        "                    pass\n",
    ),
    (
        RING,
        "a batch acks only up to the beginning of its last run",
        "acks = {run.stream: run.next for run in self.runs",
        "acks = {run.stream: run.first for run in self.runs",
    ),
    (
        RING,
        "a block of which the ring holds only the beginning counts as a duplicate",
        "run.first <= first and next_ <= run.next",
        "run.first <= first < run.next",
    ),
    (
        RING,
        "sealed batches are published youngest first",
        "self.batches.append(slot)\n        self.open = None",
        "self.batches.appendleft(slot)\n        self.open = None",
    ),
    (RING, "a late batch is stored again under the key whose time is over", "slot.late = True", "slot.late = False"),
    (
        RING,
        "a staged batch overtakes the open one",
        "if self.open is not None:\n            self.seal()\n        slot = BatchSlot(",
        "slot = BatchSlot(",
    ),
    (RING, "two publishes of a partition are in flight", " and not self.publishing\n", "\n"),
    (
        RING,
        "a run of blocks reaches over burned sequences",
        "stream.run_slot is not slot or run.next != first:",
        "stream.run_slot is not slot:",
    ),
    (
        RING,
        "an upload begins although all that may run do",
        "            if busy >= self.limits.uploads_in_flight_max:\n                break\n",
        "",
    ),
    (
        PUBLISHING,
        "after a publish whose outcome is unknown nothing is read when the time of the key is over",
        "own.unread = own.unread or tries > 0",
        "own.unread = own.unread or False",
    ),
    (PUBLISHING, "a publish is a proof although something came between", "if own.follows(offset):", "if offset:"),
    (
        PUBLISHING,
        "reading to the end is a proof dated at its answer",
        "self.own.prove(handed_over_s)\n                self.own.unread",
        "self.own.prove(self._now())\n                self.own.unread",
    ),
    (
        PUBLISHING,
        "the first page of the queue counts as all of it",
        "            if not entries:\n                self.own.prove",
        "            if True:\n                self.own.prove",
    ),
    (
        PUBLISHING,
        "an own batch that landed late is not recognised",
        "batch_sequence is not None and batch_sequence in own.landed",
        "batch_sequence is None and batch_sequence in own.landed",
    ),
    (
        PUBLISHING,
        "an owner that met a higher epoch continues",
        "if self.own.phase is Phase.FENCED:",
        "if self.own.phase is Phase.OPENING and self.own.stated:",
    ),
    (
        OWNERSHIP,
        "a proof is asked for after three S, not after a third",
        "self.stale_publish_s / 3",
        "self.stale_publish_s * 3",
    ),
    (
        OWNERSHIP,
        "an older proof replaces a younger one",
        "self.proof_s = max(self.proof_s, handed_over_s)",
        "self.proof_s = handed_over_s",
    ),
    (
        POLLS,
        "a broker keeps pointers in memory where the log has others",
        "            self._recent.compare(partition, entries)\n",
        "",
    ),
    (
        OWNERSHIP,
        "pointers of other partitions of the same log are joined",
        "self._own.pop(offset, None) is not None or pointer.partition != self.partition",
        "self._own.pop(offset, None) is not None",
    ),
    (
        OWNERSHIP,
        "a late pointer moves the end of its producer back",
        "                producer.next = max(producer.next, next_)",
        "                producer.next = next_",
    ),
    (
        OWNERSHIP,
        "a named producer's next record counts as committed",
        "producer.queued.add(0, entry.last_sequence)",
        "producer.queued.add(0, entry.last_sequence + 1)",
    ),
    (
        OWNERSHIP,
        "producers are forgotten after half the dedup window",
        "horizon = now_ms - self.dedup_window_ms",
        "horizon = now_ms - self.dedup_window_ms // 2",
    ),
    (
        OWNERSHIP,
        "a batch that is counted is adopted as if it were late",
        "and pointer.batch_sequence > self._published",
        "",
    ),
    (
        OPENING,
        "an opening reads the tail without the clock error",
        "own.dedup_window_ms - CLOCK_ERROR_MS",
        "own.dedup_window_ms",
    ),
    (
        OPENING,
        "an opening reads none of the dedup window",
        "own.opened_wall_ms - own.dedup_window_ms - CLOCK_ERROR_MS",
        "own.opened_wall_ms - CLOCK_ERROR_MS",
    ),
    (
        OPENING,
        "an epoch that the queue shows is claimed again",
        "epoch=max(current.epoch, seen) + 1",
        "epoch=current.epoch + 1",
    ),
    (
        OPENING,
        "an opening whose answer comes too late counts",
        "if clock.monotonic() - handed_over_s > own.stale_publish_s:",
        "if handed_over_s < 0:",
    ),
    (
        OPENING,
        "blocks are taken before the queue is read up to `opened`",
        "    if own.unread:\n        await publisher.read_to_end()\n",
        "",
    ),
    (
        OPENING,
        "a broker that drained an old epoch gives back the session of a younger one",
        "current.session == services.session and current.epoch == own.epoch",
        "current.session == services.session",
    ),
    (
        OPENING,
        "a partition is opened while its last owner still drains it",
        'if current.session not in ("", services.session):',
        "if not current.session:",
    ),
    (
        PROCESSOR,
        "what lies on disk of a batch is released before its pointer is in the queue",
        "        key_until_s, began_ms = slot.put_s",
        "        slot.release_tickets()\n        key_until_s, began_ms = slot.put_s",
    ),
    (
        KNOWN,
        "half a duplicate counts as one",
        "        if not producer.queued.covers(*claim[1:]):\n            raise self.conflict(header, ())\n",
        "",
    ),
    (
        KNOWN,
        "other content under the same sequences counts as a copy",
        "if copies.differ_from(header) or not (copies.blocks or copies.unread):",
        "if not (copies.blocks or copies.unread):",
    ),
    (
        KNOWN,
        "a block of the ring with other content counts as a copy",
        "if stored is None or not stored.is_copied_by(header):",
        "if stored is None:",
    ),
    (
        KNOWN,
        "pointers skip a block with other content",
        "if copies.differ_from(header):",
        "if not copies.blocks:",
    ),
    (
        APPENDER,
        "a duplicate is acked before its copy is in the queue",
        "            if waits_for is None:\n                positions",
        "            if waits_for is not stream:\n                positions",
    ),
    (
        APPENDER,
        "a duplicate is acked before what came before it on its stream",
        "waits_for = last if waits_for is None or waits_for.number < last.number else waits_for",
        "pass",
    ),
    (
        PROCESSOR,
        "a partition is released with batches in its ring",
        "self.failure is None and (len(self.ring) or self._ends or self._publishing)",
        "self.failure is None and (self._ends or self._publishing)",
    ),
    (
        PROCESSOR,
        "the greatest S of an altered topic is not waited for",
        "own.stale_publish_s = max(",
        "own.stale_publish_s = min(",
    ),
    (
        PROCESSOR,
        "an instance of a named producer begins while blocks of the one before it are on their way",
        "while self.own is own and any(",
        "while self.own is not own and any(",
    ),
    (
        KNOWN,
        "pointers skip blocks that have no known copy",
        "        if copies is None or not copies.blocks:\n            return False\n",
        "        if copies is None or not copies.blocks:\n            return True\n",
    ),
    (
        PROCESSOR,
        "streams stay open when their epoch is lost",
        "self.services.counters.fenced += 1\n        self.appender.redirect_streams()",
        "self.services.counters.fenced += 1",
    ),
    (
        HELD,
        "forwarding begins before the last publish of the lost epoch is too old",
        "own.handed_over_s + own.stale_publish_s",
        "own.handed_over_s",
    ),
    (
        HELD,
        "a block next to what the queue holds is let go",
        "                    queued.add(first, next_)",
        "                    queued.add(first, next_ + 1)",
    ),
    (
        HELD,
        "blocks that were acked with 1 only as copies are not held",
        "            acked.setdefault(producer_id, RangeSet()).add(first, next_)\n        for slab",
        "            pass\n        for slab",
    ),
    (
        FORWARDING,
        "the first page of the queue decides what is absent",
        "            if not entries:\n                return handed_over_s",
        "            if entries or not entries:\n                return handed_over_s",
    ),
    (
        FORWARDING,
        "what is absent is dated when the read ended",
        "                return handed_over_s",
        "                return self._now()",
    ),
    (
        FORWARDING,
        "a block that can't be compared now counts as absent",
        "                uncompared.add(block)",
        "                pass",
    ),
    (
        WRITER,
        "blocks that wait behind a failed write stay unanswered",
        "refused = [*group, *self._waiting]",
        "refused = [*group]",
    ),
    (
        WRITER,
        "a copy counts before it is on disk",
        APPEND + MOVE,
        MOVE + APPEND,
    ),
    (
        WRITER,
        "an ack=1 goes out for blocks that wait behind those written",
        "acks = {run.stream: run for run in group}",
        "acks = {run.stream: run for run in [*group, *self._waiting]}",
    ),
    (
        WRITER,
        "a failed segment is appended to again",
        "        self._failure = error\n        self.segments.open = None",
        "        self._failure = error",
    ),
    (
        SEGMENTS,
        "the segment that is appended to is removed",
        "if not segment.tickets and segment is not self.open]",
        "if not segment.tickets]",
    ),
    (SEGMENTS, "blocks that can't be brought are copied and lost", "not (self.kept or self.fixed)", "not self.fixed"),
    (
        REPLAY,
        "a block is brought although retention took the proof that it is absent",
        "known = [entry for entry in blocks if entry.queue_offset >= begin]",
        "known = list(blocks)",
    ),
    (
        REPLAY,
        "the queue is read from the youngest block's offset",
        "read_to = min(from_time, *(entry.queue_offset for entry in known))",
        "read_to = max(from_time, *(entry.queue_offset for entry in known))",
    ),
    (
        REPLAY,
        "a segment that could not be read is removed",
        'which the next start reads: {error}")\n            return None',
        'which the next start reads: {error}")\n            return []',
    ),
    (
        STORING,
        "a key is used for the whole safety age",
        "return settings.sweep_age_ms / 2000",
        "return settings.sweep_age_ms / 1000",
    ),
    (
        STORING,
        "an object is dated by its last put, not by its first",
        "(clock.monotonic() - started_s)\n            return started_s\n",
        "(clock.monotonic() - started_s)\n            return clock.monotonic()\n",
    ),
    (
        STORING,
        "other bytes under the key count as stored",
        "            except ObjectExistsError:\n                raise\n",
        "            except ObjectExistsError:\n                return started_s\n",
    ),
    (BLOCKS, "a block that begins below the stream's sequence is taken", "sequence == next_", "sequence <= next_"),
    (BLOCKS, "a frame may end behind the received bytes", "            and stop <= end\n", ""),
    (
        BLOCKS,
        "the checksum of a batch leaves the beginnings of large blocks out",
        "combine_crc32c(crc32c(start, value), checksum, length - CHECKED_FROM)",
        "combine_crc32c(value, checksum, length - CHECKED_FROM)",
    ),
    (BLOCKS, "a gathered write begins the next buffer where the last one ended", "number + 1, 0", "number + 1, at"),
    (HEADERS, "a batch in a shared object is indexed as if it began it", "offset + each for each", "each for each"),
    (BATCH, "the checksum of an object leaves its index out", "crc32c(index, checksum)", "checksum"),
    (
        BATCH,
        "a named producer's last sequence is that of its batch's beginning",
        "last_sequence=run.next",
        "last_sequence=run.first",
    ),
    (
        OWNERSHIP,
        "the last owner's last batch is adopted again by its successor",
        "return [entry for entry in late if entry is not last]",
        "return late",
    ),
    (
        OWNERSHIP,
        "late pointers that have no entry in a full list are not counted",
        "records, stored = last.records + late.records, last.bytes + late.bytes",
        "records, stored = last.records, last.bytes",
    ),
    (
        OWNERSHIP,
        "an entry that grew after an earlier try is taken as counted by that try",
        "self.adopted = [entry for entry in self.adopted if entry not in listed]",
        "self.adopted = [entry for entry in self.adopted if entry.offset not in {one.offset for one in listed}]",
    ),
    (
        OWNERSHIP,
        "batches that earlier owners counted are adopted",
        "if before >= stated]",
        "if before >= 0]",
    ),
    (
        SLABS,
        "a slab goes back while something points into it",
        "        if slab.references:\n            return\n",
        "        if slab.references > 1:\n            return\n",
    ),
)

"""Patches that break a rule of clients: the producer's window, readers, commits and direct writes."""

from __future__ import annotations

WINDOW = "memq/client/producer/window.py"
LEDGER = "memq/client/consumer/progress.py"
COMMITTER = "memq/client/consumer/group/session.py"
LOOKBACK = "memq/notification/dedup_window.py"
FLOW = "memq/client/consumer/fetch/partition_cursor.py"
OPENER = "memq/client/consumer/opener.py"
PLACES = "memq/client/consumer/offset_resolver.py"
FETCHER = "memq/client/consumer/fetch/fetcher.py"
POLLING = "memq/client/consumer/fetch/polling.py"
SESSION = "memq/client/consumer/group/session.py"
DIRECT = "memq/client/bulk/direct_writer.py"
COPIER = "memq/client/bulk/direct_writer.py"

STORED = "            for assigned, committed in due.values():\n                assigned.ledger.stored(committed)\n"

# path, the rule that is broken, the text, what comes in its place
CLIENT_RULES: tuple[tuple[str, str, str, str], ...] = (
    (
        FETCHER,
        "blocks that came with a pointer are not checked",
        "return pieces if pieces is not None and is_whole(pieces) else None",
        "return pieces",
    ),
    (
        FETCHER,
        "wrong blocks that came with a pointer prove damage alone",
        "    data = sent.pop()\n",
        "    data = sent[0]\n",
    ),
    (
        WINDOW,
        "blocks are sent again in reverse",
        "self._queued.extendleft(reversed(self._sent))",
        "self._queued.extendleft(self._sent)",
    ),
    (
        WINDOW,
        "a changed bit on the way fails a sound block at once",
        "    return block.is_sound()\n",
        "    return False\n",
    ),
    (
        WINDOW,
        "a block that changed in the producer's memory is sent again",
        "    return block.is_sound()\n",
        "    return True\n",
    ),
    (
        WINDOW,
        "a sound block that is always refused as damaged is sent for ever",
        "    block.refused = True\n",
        "",
    ),
    (
        WINDOW,
        "a late ack settles blocks that the closed stream never had",
        "min(event.next_sequence, self._seen_next)",
        "event.next_sequence",
    ),
    (
        WINDOW,
        "a stream is opened behind the blocks that are not acked",
        "self._stream_next = self._queued[0].first if self._queued else self.next_sequence",
        "self._stream_next = self.next_sequence",
    ),
    (
        WINDOW,
        "a block that may be stored is reported as not stored",
        "if unknown or (block.writes and not isinstance(error, IdentityConflictError)):",
        "if unknown:",
    ),
    (
        WINDOW,
        "a block that was sent before the refused one counts as not sent",
        "            if block.first >= event.first_sequence:\n                block.writes -= 1",
        "            if block.first <= event.first_sequence:\n                block.writes -= 1",
    ),
    (
        WINDOW,
        "a block says at each try that it was sent first just now",
        "        if block.first_sent_s is None:\n",
        "        if block.writes:\n",
    ),
    (
        WINDOW,
        "burned sequences are not reported at the end",
        "CloseStream(self.next_sequence, list(self.burned))",
        "CloseStream(self.next_sequence, [])",
    ),
    (
        WINDOW,
        "blocks go out over the gap of a burned one",
        "if self._queued and self._queued[0].first == self._stream_next:",
        "if self._queued:",
    ),
    (
        LEDGER,
        "what was handed out is committed before it is done",
        "        while self._entries and self._entries[0].done:\n",
        "        while self._entries:\n",
    ),
    (
        LEDGER,
        "a batch that is done commits those before it",
        "        while self._entries and self._entries[0].done:\n",
        "        while self._entries and any(entry.done for entry in self._entries):\n",
    ),
    (
        COMMITTER,
        "positions count as stored before the group has answered",
        "            try:\n                await self._group.commit(",
        STORED + "            try:\n                await self._group.commit(",
    ),
    (
        COMMITTER,
        "two commits of one consumer run at once",
        "        async with self._busy:\n            self._ready_batches.settle()",
        "        if True:\n            self._ready_batches.settle()",
    ),
    (
        LOOKBACK,
        "a slice of the window is forgotten when its first entry is old",
        "self._slices[1][0] <= time_ms - self._window_ms",
        "self._slices[0][0] <= time_ms - self._window_ms",
    ),
    (
        LOOKBACK,
        "a late copy moves the end of its producer back",
        "self._next[source] = max(self._next.get(source, 0), next_)",
        "self._next[source] = next_",
    ),
    (
        LOOKBACK,
        "a block of which a part is new is dropped",
        "return Novelty.NEW if unseen == [(first, next_)] else Novelty.PARTLY",
        "return Novelty.NEW if unseen == [(first, next_)] else Novelty.SEEN",
    ),
    (
        FLOW,
        "the index of a batch with many producers is not asked for",
        "incomplete.append(pointer)",
        "pass",
    ),
    (
        FLOW,
        "what retention took is passed over in silence",
        "return min(first, span.begin) if min(first, span.begin) > self._next_offset else None",
        "return None",
    ),
    (
        OPENER,
        "a group reads on in a log that was cut while it was away",
        "position, known, mark = stored.position, stored.totals, stored.mark",
        "position, known, mark = stored.position, stored.totals, 0",
    ),
    (
        PLACES,
        "a start is not compared with the log",
        "            await self.check_continuity(partition, cursor.continuity)\n",
        "            pass\n",
    ),
    (
        OPENER,
        "a start has no mark until the reader has looked back",
        "        return await self._resolver.marked(partition, position)\n",
        "        return position\n",
    ),
    (
        PLACES,
        "another pointer before the position is taken for the one that was read",
        "if known not in (0, mark):",
        "if known not in (0, mark, known):",
    ),
    (
        POLLING,
        "a reader reads on in a log that was cut while it ran",
        "doubtful or not cursor.take_entries(first_run(polled.entries), compared=False)",
        "doubtful or not cursor.take_entries(first_run(polled.entries))",
    ),
    (
        POLLING,
        "a log that is shorter than what was read of it is waited for without a word",
        "    return polled.span.end < cursor.continuity.reached.pointer_offset",
        "    return False",
    ),
    (
        FLOW,
        "a position inside a batch has the mark of the batch before",
        "self._mark = slot.mark if index else self._mark",
        "self._mark = self._mark",
    ),
    (
        LEDGER,
        "pointers of an epoch that was not opened follow",
        "    return pointer.epoch == epoch and pointer.batch_sequence == batch + 1",
        "    return pointer.batch_sequence == batch + 1",
    ),
    (
        LEDGER,
        "a pointer that comes again is not compared with the log",
        "    return pointer.epoch == epoch and pointer.batch_sequence == batch + 1",
        "    return pointer.epoch == epoch and pointer.batch_sequence in (batch, batch + 1)",
    ),
    (
        OPENER,
        "a partition is read that was given back while it was opened",
        "if self._wanted().get(partition) == grant:",
        "if partition in self._wanted():",
    ),
    (
        OPENER,
        "a seek takes back a partition that was taken meanwhile",
        "        if assigned.removed:\n",
        "        if assigned is None:\n",
    ),
    (
        SESSION,
        "a member that was silent for its session holds on to its partitions",
        "if self.state.inside and self._silent_ms() > self._session_ms:",
        "if self.state.inside and self._silent_ms() < 0:",
    ),
    (
        SESSION,
        "the session is counted from the answer, not from the question",
        "        self._heard_s = asked_s\n",
        "        self._heard_s = self._runtime.clock.monotonic()\n",
    ),
    (
        SESSION,
        "a member that is out of its group commits",
        "        if not self.state.inside:\n            raise",
        "        if self.state is None:\n            raise",
    ),
    (
        DIRECT,
        "a task ends before its blocks are in the queue",
        "                await self._last.drain()\n                break",
        "                break",
    ),
    (
        COPIER,
        "blocks of an order that was refused are not sent again",
        "refused.append(self._pending.popleft()[1])",
        "self._pending.popleft()",
    ),
    (
        DIRECT,
        "two batches of a writer share their identities",
        "\\n{self.batch_id}\\n{self.task}",
        "\\n{self.task}",
    ),
    (
        DIRECT,
        "two queries of a writer share their identities",
        "\\n{self.stream}\\n{self.batch_id}",
        "\\n{self.batch_id}",
    ),
    (
        DIRECT,
        "the block that is open at the end is not sent",
        "        for cut in self._cutter.end():\n            await self._send(cut)\n        while",
        "        while",
    ),
)

"""Patches that break a rule of what stays: queues, groups, stores, retention, the sweep and compacted parts."""

from __future__ import annotations

SWEEP = "memq/broker/sweep/sweep.py"
RETENTION = "memq/broker/upkeep/retention.py"
COMPACTION_RETENTION = "memq/broker/upkeep/retention.py"
COMPACTION = "memq/compaction/compaction.py"
COMPACTION_PLAN = "memq/compaction/plan.py"
COMPACTION_READER = "memq/compaction/reader.py"
CUT_BATCH = "memq/format/batch.py"
GROUPS = "memq/groups/group.py"
GROUP_COMMIT = "memq/notification/sqlite/group_commit.py"
SQLITE_LOG = "memq/notification/sqlite/log.py"
SQLITE_GROUPS = "memq/notification/sqlite/former_groups.py"
SQLITE_ROWS = "memq/runtime/sqlite_file.py"
TOPICS_FILE = "memq/governor/standalone.py"
TAKEOVERS = "memq/governor/zookeeper/takeovers.py"
FILES = "memq/storage_handlers/files.py"
MEMORY_STORE = "memq/storage_handlers/memory.py"

NAME = "                self._name(temporary, key, size, checksum)\n"
EXISTS = "                    raise ObjectExistsError(f\"another object has the key '{key}'\") from None\n"

# path, the rule that is broken, the text, what comes in its place
LOG_RULES: tuple[tuple[str, str, str, str], ...] = (
    (
        TAKEOVERS,
        "a governor that began its term after the reading of its node is replaced",
        "if held.session not in ended or held.term != term.version:",
        "if held.session not in ended:",
    ),
    (
        SWEEP,
        "a topic whose log can't be read as a whole is swept",
        'is not swept: {fault}")\n                return False',
        'is not swept: {fault}")\n                continue',
    ),
    (
        SWEEP,
        "objects are swept by the time at which they were staged, whatever their prefix",
        "if entry.key.startswith(self._staged) else bound_ms",
        "if not entry.key.startswith(self._staged) else bound_ms",
    ),
    (
        SWEEP,
        "what is claimed by a log that lost it is swept",
        "                del keys[entry.key]\n",
        "",
    ),
    (
        RETENTION,
        "an object goes although a younger pointer names it",
        "for key in keys_of(pointer) if key not in kept",
        "for key in keys_of(pointer)",
    ),
    (
        RETENTION,
        "retention takes the last pointers of a partition",
        "_trim_count(known, min(wanted, min(bounds.values(), default=0)))",
        "_trim_count(known, wanted)",
    ),
    (
        RETENTION,
        "retention leaves a late try of a batch whose first pointer it removes",
        "_trim_count(known, min(wanted, min(bounds.values(), default=0)))",
        "min(wanted, min(bounds.values(), default=0))",
    ),
    (
        COMPACTION_RETENTION,
        "compacted parts go although the queue holds too few bytes behind them",
        "bytes_behind += sum(part.bytes for part in manifest.parts)",
        "bytes_behind += 2 * sum(part.bytes for part in manifest.parts)",
    ),
    (
        COMPACTION,
        "pointers leave the queue before a manifest has them",
        "        if await publish_parts(",
        "        await queue.trim(partition, copied[-1].part.next)\n        if await publish_parts(",
    ),
    (
        COMPACTION,
        "a manifest takes parts that do not follow on it",
        "    if parts[0].first > manifest.next and await _begin_of(queue, manifest) > manifest.next:\n",
        "    if not parts:\n",
    ),
    (
        COMPACTION,
        "a lost entry gives up all compacted ones",
        " and await _begin_of(queue, manifest) > manifest.next:",
        ":",
    ),
    (
        COMPACTION_PLAN,
        "what leaves a manifest is forgotten at once",
        "now_ms - 2 * kept_ms",
        "now_ms",
    ),
    (
        COMPACTION_PLAN,
        "what retention took of a manifest is not named any more",
        "left=left + tuple(LeftPart(part=part, since_ms=now_ms) for part in manifest.parts[:count]),",
        "left=left,",
    ),
    (
        COMPACTION_PLAN,
        "the next compaction skips a pointer",
        "next=parts[-1].next if parts else manifest.next",
        "next=parts[-1].next + 1 if parts else manifest.next",
    ),
    (
        COMPACTION_PLAN,
        "pointers that an opening wants are compacted",
        "return min([age_ms, *needs.since_ms(settings).values()])",
        "return age_ms",
    ),
    (
        COMPACTION_READER,
        "a reader begins in a part although the queue begins behind it",
        "and manifest.parts and manifest.next >= begin else None",
        "and manifest.parts else None",
    ),
    (
        COMPACTION_READER,
        "two compactions publish the same number",
        "        except ObjectExistsError:\n            return False\n",
        "        except ObjectExistsError:\n            return True\n",
    ),
    (
        COMPACTION_READER,
        "a writer that slept publishes a number that was swept",
        "return await self.highest_number(partition) == manifest.number",
        "return True",
    ),
    (
        COMPACTION,
        "the originals are not named while readers may be at them",
        "originals = tuple(each for each in named if each not in objects)",
        "originals = tuple(each for each in named if each in objects)",
    ),
    (
        CUT_BATCH,
        "a batch that holds too few records is whole",
        "    if records is not None and first < records:\n",
        "    if records is not None and first > records:\n",
    ),
    (
        GROUPS,
        "a release answers a revocation that the member has not seen",
        "0 < hold.revoking <= generation)",
        "hold.revoking)",
    ),
    (
        GROUPS,
        "a member commits positions of partitions that it does not hold",
        "since.get(partition, generation + 1) > generation",
        "since.get(partition, generation) > generation",
    ),
    (
        GROUPS,
        "a member commits for a generation in which another one held the partition",
        "since.get(partition, generation + 1) > generation",
        "partition not in since",
    ),
    (
        GROUPS,
        "a partition is given to the next member before it is given back",
        "            if partition not in holders:\n",
        "            if kept.get(partition) != name:\n",
    ),
    (
        GROUPS,
        "what a member held before it joined again counts on",
        "HeldPartition(hold.partition, joined, hold.revoking)",
        "HeldPartition(hold.partition, hold.since, hold.revoking)",
    ),
    (
        GROUPS,
        "an older instance of a member continues",
        "if not member.joined <= generation <= self.generation:",
        "if generation > self.generation:",
    ),
    (
        GROUPS,
        "positions are set from outside while members are at work",
        'return self.check_no_members("positions can\'t be set")',
        "return None",
    ),
    (
        GROUP_COMMIT,
        "what a job wrote before it refused is committed",
        "return self._connection.total_changes == changes",
        "return True",
    ),
    (
        GROUP_COMMIT,
        "jobs hear of success when SQLite failed",
        "                pending.error = self._file.error(error)\n                pending.error.__cause__ = error\n",
        "                pending.error = None\n",
    ),
    (
        SQLITE_LOG,
        "a publish of a lower epoch is taken",
        "check_epoch(publication, highest or 0)",
        "check_epoch(publication, 0)",
    ),
    (
        SQLITE_LOG,
        "what retention took is read",
        "next_, size = min(max(offset, row.begin), row.next), 0",
        "next_, size = min(offset, row.next), 0",
    ),
    (
        SQLITE_LOG,
        "a seek by time trusts the greatest time of what was trimmed",
        "entry_ms >= time_ms:",
        "entry_ms >= time_ms - 1_000_000_000:",
    ),
    (
        SQLITE_LOG,
        "an end that lies before entries is believed",
        "    _check_end(connection, row)\n    identity = row.identity\n",
        "    identity = row.identity\n",
    ),
    (
        SQLITE_LOG,
        "a lost epoch is taken for none",
        "if found is None and len(rows) != row.epochs:",
        "if found is None and len(rows) > row.epochs:",
    ),
    (
        SQLITE_LOG,
        "a partition whose row is damaged is created again",
        "if _may_be(connection, row, key):",
        "if False:",
    ),
    (
        SQLITE_ROWS,
        "a row of another partition is believed",
        "crc32c(_encode((table, values)), of)",
        "crc32c(_encode((table, values)))",
    ),
    (
        TOPICS_FILE,
        "a topic whose row is lost passes for a deleted one",
        "for lost in sorted(known.keys() ^ there):",
        "for lost in sorted(known.keys() - there):",
    ),
    (
        SQLITE_GROUPS,
        "a lost position is taken for none",
        "if len(found) != count:",
        "if len(found) > count:",
    ),
    (
        SQLITE_GROUPS,
        "positions are set while members are at work",
        "if members := stored.membership.active(now_ms):",
        "if members := ():",
    ),
    (
        FILES,
        "an object is named before its bytes are synced",
        "                sync_file(handle)\n            finally:\n",
        NAME + "                sync_file(handle)\n            finally:\n",
    ),
    (
        FILES,
        "the name of an object that was there already is not synced",
        EXISTS,
        EXISTS + "                return\n",
    ),
    (
        FILES,
        "bytes that changed in memory become an object",
        "                if found != checksum:\n",
        "                if not size:\n",
    ),
    (
        FILES,
        "another object of the same size counts as this one",
        "        return value == checksum\n",
        "        return True\n",
    ),
)

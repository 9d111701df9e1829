"""The plan of a copy of a foreign log: block boundaries and range, safe against a kill. Pure.

A copied record has its source's offset as its sequence, under a producer id that only the pair of source partition and
target topic has. So it is the same record whoever copies it, and when. memq drops what comes twice by whole
blocks, so a copy that continues where another one was killed has to cut as that one did: what was on its way then may
still arrive. Three things make the cut:

1. It begins where a block ended: behind the greatest sequence that the target's queue shows, or the plan's start.
2. It follows from the records alone (`memq.client.bulk.block_cutter`).
3. It ends at the plan's end, not at the end that the source has by chance. So that is stored before the first record is
   sent, and a copy that finds a plan fulfills it before it makes the next one.
"""

from __future__ import annotations

import hashlib
import re

# The name of the rule by which blocks are cut: other bounds in `block_cutter` need another name.
RULE = "memq-import1"
_PLAN = re.compile(rf"{RULE} (\d{{1,19}})\Z")


def producer_of(cluster: str, topic_id: str, partition: int, target_id: str) -> int:
    """Return the producer id of all copies of one source partition into one topic."""
    named = f"{RULE}\n{cluster}\n{topic_id}\n{partition}\n{target_id}".encode()
    return int.from_bytes(hashlib.sha256(named).digest()[:8], "big") >> 1 or 1


def encode_plan(end: int) -> str:
    """Return the metadata stored with the position: the offset at which the copy ends."""
    return f"{RULE} {end}"


def decode_plan(metadata: str) -> int | None:
    """Return the end of a plan; None for what is none."""
    found = _PLAN.match(metadata)
    return int(found[1]) if found else None

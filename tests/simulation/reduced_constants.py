"""Reduced constants of the product for one run: at their real size no short run reaches their bounds.

A constant is named `module:NAME`. `scaled` sets it wherever the product has it under that name with that value, since
modules import each other's constants. Those of which a promise speaks (how long an ack=1 block is brought on, how
often damage is fetched again) keep their size.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Constants = Mapping[str, float]
CLOCK_ERROR = "memq.topic:CLOCK_ERROR_MS"
AHEAD = "memq.notification.memory:AHEAD_MS_MAX"
REQUESTS = "memq.broker.api.requests:REQUESTS_PER_CONNECTION_MAX"
FETCHES = "memq.client.consumer.fetch.fetch_scheduler:FETCHES_MAX"
LOOK_BACKS = "memq.client.consumer.fetch.fetch_scheduler:LOOK_BACKS_MAX"
SNAPSHOTS = "memq.state_log.state_log:SNAPSHOT_S"
FORGET = "memq.broker.upkeep.deleted_topics:FORGET_S"
STATES = "memq.broker.service_partitions.hosts:STATE_PARTITIONS"
PARTS = "memq.limits:TRANSACTION_TARGET_BYTES_MAX"  # a larger part of a transaction is staged
PIECES = "memq.groups.pieces:PIECE_BYTES_MAX"
RUNS: dict[str, tuple[float, ...]] = {  # delayed records move into runs, which are merged; queue items do, too
    "memq.holds.run_keeper:NEAR_S": (4.0, 12.0),
    "memq.holds.run_keeper:SPILL_HOLDS": (1, 3),
    "memq.holds.run_keeper:AHEAD_HOLDS": (3, 10),
    "memq.holds.run_keeper:FANOUT": (2, 3),
    "memq.holds.run_keeper:DROPPED_MAX": (1, 4),
    "memq.state_log.run_store:OBJECT_HOLDS": (2, 8),
    "memq.queues.runs.keeper:KEEP_ITEMS": (0, 2),
    "memq.queues.runs.keeper:RUN_BLOCKS": (1, 2),
    "memq.queues.runs.keeper:AHEAD_ITEMS": (1, 3),
    "memq.queues.runs.keeper:BRING_ITEMS": (1, 3),
    "memq.limits:RUN_BLOCK_HOLDS": (1, 3),
}
SESSIONS = "memq.groups.group:SESSION_MS_PER_MEMBER"  # small groups have long sessions
LONG_SESSIONS_RATE = 0.2
CLOCK_ERRORS_MS = (200, 1_000, 5_000)
RATE = 0.5  # how many of the table a run has
TABLE: dict[str, tuple[float, ...]] = {
    # broker: reads of the log, what an owner remembers, what one step takes
    "memq.broker.sweep.log_reading:READ_BYTES": (1, 2_000),  # retention, restore, and the search for stored blocks
    "memq.notification.stored_blocks:STEP_OFFSETS": (1, 3),
    "memq.broker.partition.known_blocks:RECENT_BATCHES": (1,),
    "memq.broker.partition.known_blocks:RECENT_BLOCKS_MAX": (0, 2),
    "memq.broker.partition.known_blocks:CLAIMS_MAX": (1, 3),
    "memq.broker.partition.known_blocks:ANSWERS_MAX": (1, 10),
    "memq.broker.partition.ownership:ADOPTED_MAX": (1, 2),
    "memq.broker.ingest.intake:ASIDE_BYTES": (1_000,),
    "memq.broker.ingest.intake:MOVED_BYTES_MAX": (0, 200),
    "memq.broker.ingest.slabs:READ_BYTES_MIN": (100, 1_000),
    "memq.storage_handlers.confirmed_reads:TAIL_BYTES": (40, 200),
    "memq.broker.api.requests:HELD_MS_MAX": (50, 500),
    REQUESTS: (2, 8),
    "memq.broker.ingest.connection:THROTTLE_MS": (1,),
    "memq.broker.spool.forwarding:IN_FLIGHT_BLOCKS_MAX": (1, 2),
    "memq.broker.services:OPENINGS_AT_ONCE_MAX": (1,),
    "memq.broker.services:CLOSINGS_AT_ONCE_MAX": (1,),
    "memq.broker.partition.storing:SHARED_BATCHES_MAX": (2,),
    "memq.broker.partition.storing:UPLOADS_IN_FLIGHT_MAX": (1,),
    "memq.broker.spool.writer:GROUP_BYTES_MAX": (1, 2_000),
    "memq.broker.spool.replay:WORKS_MAX": (1,),
    "memq.runtime.tasks:PARTITIONS_AT_ONCE_MAX": (1,),
    "memq.broker.api.staged_publisher:READS_AT_ONCE_MAX": (1,),
    "memq.broker.sweep.sweep:SWEPT_KEYS_MAX": (20, 50),  # all logs and lists are read for each so many
    "memq.format.packed_file:LISTED_MAX": (1, 3),
    "memq.governor.governor:CHANGES_AT_ONCE_MAX": (1,),
    # clients: polls, deliveries, what is fetched ahead, how long something is believed
    "memq.limits:POLL_BYTES_MAX": (1, 1_000),
    "memq.limits:READ_BYTES_MAX": (400, 2_000),  # with 100 a group reads 9 KB/s, and comes to no end
    "memq.client.consumer.fetch.partition_cursor:DELIVERY_BYTES": (1, 500),
    "memq.client.consumer.fetch.partition_cursor:PART_BYTES_MIN": (1, 500),
    "memq.client.consumer.fetch.partition_cursor:SLOTS_MAX": (2, 5),
    "memq.client.consumer.fetch.fetcher:INDEXES_MAX": (1,),
    "memq.client.consumer.fetch.fetcher:GAP_BYTES_MIN": (1, 500),
    "memq.client.consumer.fetch.pointer_slot:WHOLE_BATCHES": (0, 1),
    "memq.client.consumer.offset_resolver:TAIL_OFFSETS": (1, 3),
    FETCHES: (1, 2),
    LOOK_BACKS: (1,),
    "memq.client.consumer.fetch.polling:POLL_WAIT_MS": (100, 500),
    "memq.client.consumer.core:REFRESH_S": (0.5,),  # that of the reader of compacted parts, too
    "memq.client.producer.core:METADATA_AGE_S_MAX": (0.5, 5.0),
    "memq.client.link_pool:DEAD_S": (0.1,),
    "memq.client.producer.core:BEGINNINGS_AT_ONCE_MAX": (1,),
    "memq.client.producer.send_buffer:FIRST_LIMIT_BYTES": (100,),
    "memq.client.bulk.staged_writer:PARTITIONS_AT_ONCE_MAX": (1,),
    "memq.client.bulk.kafka_import:STEP": (1,),
    "memq.compaction.compaction:OBJECTS_MAX": (1, 2),
    "memq.compaction.compaction:READS_MAX": (1,),
    "memq.compaction.reader:PARTS_BYTES_MAX": (0, 2_000),
}


def constants_of(seed: int) -> Constants:
    """Return the constants that each run has, also one without thin margins: it waits at its end for two FORGET_S.

    Delays of a run are at most a minute.
    """
    draw = random.Random(f"{seed}/states")
    found = {FORGET: 4.0, STATES: draw.choice([1, 2, 4, 8]), **{name: draw.choice(few) for name, few in RUNS.items()}}
    return found | ({SESSIONS: draw.choice([500, 2_000])} if draw.random() < LONG_SESSIONS_RATE else {})


def draw_constants(draw: random.Random) -> Constants:
    """Draw which constants are small in a run, and how small.

    A broker may take fewer requests of a connection than a consumer has under way: polls and fetches are refused then.
    They come again, and heartbeats and commits have room of their own.
    """
    error_ms = draw.choice(CLOCK_ERRORS_MS)
    some = {name: draw.choice(values) for name, values in TABLE.items() if draw.random() < RATE}
    if REQUESTS in some:
        some |= {FETCHES: some.get(FETCHES, 2), LOOK_BACKS: 1}
    return {CLOCK_ERROR: error_ms, AHEAD: error_ms // 2, **some}


@contextmanager
def scaled(constants: Constants) -> Iterator[None]:
    """Give the product these constants while the block runs."""
    usual: dict[str, float] = {}
    for place in constants:
        home, name = place.split(":")
        usual[name] = getattr(importlib.import_module(home), name)
    small = {place.split(":")[1]: value for place, value in constants.items()}
    modules = _product()
    places = [(names, name) for name in small for names in modules.values() if names.get(name) == usual[name]]
    try:
        for names, name in places:
            names[name] = small[name]
        yield
    finally:
        for names, name in places:
            names[name] = usual[name]
        for module, names in _product().items():
            if module not in modules:  # it was imported meanwhile, with what it imported
                names.update({name: usual[name] for name in small if names.get(name) == small[name]})


def _product() -> dict[str, dict[str, Any]]:
    """Return the names in each module of the product."""
    return {name: module.__dict__ for name, module in list(sys.modules.items()) if name.split(".")[0] == "memq"}

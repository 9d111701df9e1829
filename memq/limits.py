"""Bounds that the formats and the protocol promise, and the version of the library.

A value beyond one is refused before anything is allocated.
"""

from __future__ import annotations

VERSION = "0.1.0"  # the public name is `memq.__version__`

KIB = 1 << 10
MIB = 1 << 20

# The version byte of block, object and pointer: what is written, and what can be read.
FORMAT_VERSION = 1  # for ever readable from here on
FORMAT_VERSIONS = (1,)

# Block (docs/formats.md).
BLOCK_HEADER_BYTES = 72
BLOCK_RAW_BYTES_MAX = 16 * MIB
BLOCK_RECORDS_MAX = 1 << 20
BLOCK_BYTES_MAX = BLOCK_HEADER_BYTES + BLOCK_RAW_BYTES_MAX
SEQUENCE_END = 1 << 63
PRODUCER_ID_END = 1 << 63
SLOTS = 1 << 16
TIME_MS_END = 1 << 53  # timestamps lie between -2^53 and 2^53 ms, so that JSON can carry them

# Envelope of an encrypted block.
ENVELOPE_VERSION = 1
ENVELOPE_KEY_ID_BYTES_MAX = 255
ENVELOPE_WRAPPED_KEY_BYTES_MAX = 1_024

# Names of headers and tags, inside a block.
NAME_BYTES_MAX = 65_535
NAMES_MAX = 65_535
HEADERS_PER_RECORD_MAX = 65_535

# Object.
INDEX_HEAD_BYTES = 24
BATCH_ENTRY_BYTES = 64
BLOCK_ENTRY_BYTES = 64
TRAILER_BYTES = 32
OBJECT_META_BYTES_MAX = 1 * MIB
OBJECT_BLOCKS_MAX = 1 << 20
OBJECT_BATCHES_MAX = 1 << 16
OBJECT_BYTES_MAX = 512 * MIB  # the largest batch has 256 MiB, the largest index 64 MiB and its meta

# Pointer.
POINTER_BYTES_MAX = 64 * KIB
POINTER_RANGES_MAX = 512
NAMED_PRODUCERS_MAX = 128  # that a write partition remembers: all go into one pointer

# State log.
STATE_NAME_BYTES_MAX = 1_024  # of a machine, or of the broker in `opened`
STATE_KEY_BYTES_MAX = 1_024  # first part of the keys of a snapshot
STATE_PART_BYTES_MAX = 8 * MIB  # of a snapshot, before compression
STATE_PARTS_MAX = 1_024
COVERED_MAX = 8  # write partitions of a position, and epochs of each, that it names
TRIED_MAX = 16  # records of a position with tries that had no answer
TRIES_MAX = 0xFFFF  # of one of them

# Held records.
DELAY_MS_MAX = 366 * 86_400_000
HOLDS_PER_REQUEST_MAX = 1_024
RUN_BLOCK_HOLDS = 1_024  # in one block of a run: a cancel of a hold that is due late reads as many
HOLD_BYTES_MAX = 512 * KIB  # of one held block: a request carries it as text

# Queues.
QUEUE_PRIORITY_MAX = 9  # 0 is the first
QUEUE_LEASE_MS_MIN, QUEUE_LEASE_MS_MAX = 1_000, 43_200_000
QUEUE_DELAY_MS_MAX = DELAY_MS_MAX  # of a delay, and of a life
QUEUE_ATTEMPTS_MAX = 1_000
QUEUE_NOTE_BYTES_MAX = 1 * KIB  # of the metadata of a nack: they lie in the state
QUEUE_METADATA_BYTES_MAX = 16 * KIB  # of an item
QUEUE_ITEMS_PER_REQUEST_MAX = 1_024  # also of a block
QUEUES_PER_REQUEST_MAX = 256
QUEUE_PEEK_MAX = 100  # items with their payloads in one answer
QUEUE_KEY_CHARS_MAX = 128  # of a key, and of a dedupe key
QUEUE_DEDUPE_MS_MIN, QUEUE_DEDUPE_MS_MAX = 1_000, 86_400_000
QUEUE_KNOWN_BLOCKS_MAX = 32  # that a request for items may name
POP_RECORD_BYTES_MAX = 2 * MIB  # of a topic whose records are leased: `record_bytes_max` of its settings
POP_BLOCK_BYTES_MAX = 2 * MIB + 768 * KIB  # of a block of such a topic: one answer has it as text
QUEUE_WAIT_MS_MAX = 20_000  # of one request; clients ask again

# Transactions.
TRANSACTION_TIMEOUT_MS_MIN = 1_000
TRANSACTION_TIMEOUT_MS_MAX = 900_000
TRANSACTION_NOTE_BYTES_MAX = 1 * KIB  # of a program, for the one that decides
TRANSACTION_TARGET_BYTES_MAX = 4 * MIB  # of the blocks for one partition: they lie in one batch

# Staged commits.
BATCH_ID_END = 1 << 53  # batch ids grow, and fit any JSON reader
MANIFEST_BYTES_MAX = 64 * MIB
STAGED_PIECES_MAX = 64  # that one request publishes
STAGED_PARTS_MAX = 100  # of a transaction that one request holds: they lie in one entry of the state log
TRANSACTION_STAGED_BYTES_MAX = 64 * MIB  # of a part for one partition that its producer stages: one batch

# Compaction.
COMPACTION_RAW_BYTES_MAX = BLOCK_RAW_BYTES_MAX  # of a manifest, or of a part of one, unpacked
COMPACTION_POINTER_BYTES_MAX = 4 * MIB  # pointers of one part: what a reader loads of a manifest at once
COMPACTION_BLOCKS_MAX = 1 << 16  # of one large object: its index has 4 MiB

# Topics.
NAME_CHARS_MAX = 249  # of clusters, brokers and groups too
PARTITIONS_MAX = 4_096

# Frames.
FRAME_PREFIX_BYTES = 16
CONTROL_BODY_BYTES_MAX = 4 * MIB
READ_BYTES_MAX = 8 * MIB
POLL_BYTES_MAX = 1 * MIB
POLL_BLOCKS_BYTES_MAX = 1 * MIB  # blocks in one POLL answer, after its pointers
STREAMS_PER_CONNECTION_MAX = 16_384

SOUGHT_RANGES_MAX = 4_096  # of records that one request asks a broker for
HELD_RANGES_MAX = 32_768  # that its answer names

FORWARD_S_MAX = (
    600.0  # for so long no owner takes any block of a partition: then what was acked with 1 is given up, and named
)

"""Planted bugs of identities: a copy that is none, a producer that cuts its blocks again."""

from __future__ import annotations

from tests.simulation.bug import Planted, before, body, instead, swap

IDENTITY_BUGS = (
    Planted(
        "blocks that come with a pointer are taken unchecked",
        "memq.client.consumer.fetch.fetcher",
        "BatchFetcher.cut_sent",
        swap("pieces is not None and is_whole(pieces)", "pieces is not None"),
        level="calm",
        seed=1_002,
        aspects=("lies",),
    ),
    Planted(
        "copy acked without a comparison",
        "memq.format.blocks.header",
        "StoredBlock.is_copied_by",
        body("return (header.producer_id, header.first_sequence, header.next_sequence) == self[:3]"),
        level="calm",
        producers=("clone",),
    ),
    Planted(
        "frames taken whatever their checksum is",
        "memq.protocol.link",
        "Link._take",
        instead("take_checksum", "frame = frame._replace(body=frame.body[:-4])"),
        level="breezy",
        aspects=("flips",),
    ),
    Planted(
        "block that overlaps taken for a new one",
        "memq.broker.partition.known_blocks",
        "KnownBlocks.holds",
        swap("ring.overlaps(*claim)", "False"),
        level="calm",
        producers=("clone",),
    ),
    Planted(
        "producer cuts blocks again after a reconnect",
        "memq.client.producer.partition_sender",
        "PartitionSender._write",
        before(
            "link.write",
            "from awscrt.checksums import crc32c\n"
            "if block.writes > 1:\n"
            "    data = bytearray(block.data)\n"
            "    data[64] ^= 1\n"
            "    data[4:8] = crc32c(bytes(data[8:])).to_bytes(4, 'little')\n"
            "    block.data = data\n",
        ),
        seed=1_075,
        producers=("product",),
    ),
    Planted(
        "writer takes a refusal for written",
        "memq.client.bulk.direct_writer",
        "FixedIdentityWriter.take_refused",
        swap("refused.append(self._pending.popleft()[1])", "self._pending.popleft()"),
        level="calm",
        aspects=("direct",),
    ),
    Planted(
        "position of a batch whose copy readers take",
        "memq.broker.partition.publishing",
        "Publisher.publish",
        swap("offset if first else None", "offset"),
        level="sleepy",
        quick_failover=True,
        seed=70,
        producers=("clone", "product"),
    ),
    Planted(
        "position of the record behind",
        "memq.broker.partition.ring",
        "SlotRun.positions",
        swap("AckPosition(first, end, pointer_offset, index)", "AckPosition(first, end, pointer_offset, index + 1)"),
        level="calm",
        producers=("product",),
    ),
)

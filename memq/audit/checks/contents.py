"""Content of a topic's last blocks; distinguishes a copy from another block with its sequences. Pure."""

from __future__ import annotations

from memq.format.blocks.header import BlockHeader, StoredBlock

BLOCKS_MAX = 65_536  # about 15 MB; what lies further apart than that is judged by its sequences alone


class Contents:
    """The blocks that were met last, by write partition, producer and first sequence."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int, int], StoredBlock] = {}
        self._forgotten = False

    def add(self, partition: int, header: BlockHeader) -> None:
        """Remember a block; the first one of its sequences stays."""
        place = (partition, header.producer_id, header.first_sequence)
        stored = StoredBlock(*place[1:], header.next_sequence, header.checksum, header.base_ms)
        if self._blocks.setdefault(place, stored) is stored and len(self._blocks) > BLOCKS_MAX:
            del self._blocks[next(iter(self._blocks))]
            self._forgotten = True

    def differs(self, partition: int, header: BlockHeader) -> bool:
        """Whether a block, all of whose sequences were met, is known to be no copy."""
        known = self._blocks.get((partition, header.producer_id, header.first_sequence))
        return not self._forgotten if known is None else not known.is_copied_by(header)

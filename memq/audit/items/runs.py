"""The blocks in runs by the rules of the audit: which decisions move them, and back. Pure."""

from __future__ import annotations

from memq.format.state_log.run import BEFORE_ALL, NamedRun, RunPlace
from memq.queues.runs.spilled import BringBlocksDecision, SavedRun, SpillBlocksDecision, ids_in


class AuditedRuns:
    """The runs of one shard. The fold says which blocks may move."""

    def __init__(self) -> None:
        self.named: dict[str, NamedRun] = {}  # that have a block, by key
        self._left: dict[str, set[int]] = {}
        self._at: dict[str, RunPlace] = {}
        self._of_block: dict[int, str] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._of_block

    def begin(self, saved: SavedRun) -> None:
        """Add a run of the snapshot from which the fold begins."""
        self._add(saved.run, set(ids_in(saved.ids)), saved.at)

    def spill(self, decision: SpillBlocksDecision, moved: set[int]) -> None:
        """Add a run with the blocks `moved`; those of a run with a known key stay."""
        if moved and decision.run.key not in self.named:
            self._add(decision.run, moved, BEFORE_ALL)

    def _add(self, run: NamedRun, blocks: set[int], at: RunPlace) -> None:
        self.named[run.key], self._left[run.key], self._at[run.key] = run, blocks, at
        self._of_block.update(dict.fromkeys(blocks, run.key))

    def bring(self, decision: BringBlocksDecision) -> list[int]:
        """Return the blocks of a decision that leave their run; none if the run is at another place."""
        left = self._left.get(decision.run)
        if left is None or self._at[decision.run] != decision.before:
            return []
        found = [each.block.id.producer for each in decision.blocks if each.block.id.producer in left]
        for id_ in found:
            left.remove(id_)
            del self._of_block[id_]
        self._at[decision.run] = decision.to
        if not left:
            del self.named[decision.run], self._left[decision.run], self._at[decision.run]
        return found

"""A state log without entries, for tests of services: a decision counts after a pause, or fails as the test says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from memq.errors import MemqError
from memq.state_log import Answer, StateMachine
from tests.skipping_loop import now_s, skip


class InstantLog:
    """Applies each decision after `delay_s`. The next proposals and proofs fail with `errors`.

    `applied` has the time and the bytes of each decision. `on_fresh` runs in each proof, `proofs` counts them, and
    `before` runs before each decision counts.
    """

    def __init__(self, machines: Mapping[str, StateMachine]) -> None:
        self.machines = machines
        self.delay_s = 0.0
        self.errors: list[MemqError] = []
        self.applied: list[tuple[float, bytes]] = []
        self.on_fresh: Callable[[], object] = int
        self.before: Callable[[], object] = int
        self.proofs = 0
        self.proved_s = -math.inf
        self.is_owner = True

    async def propose(self, machine: str, body: bytes) -> Answer:
        """See `StateLog.propose`."""
        began_s = now_s()
        await skip(self.delay_s)
        if self.errors:
            raise self.errors.pop(0)
        self.proved_s = began_s
        self.before()
        self.applied.append((now_s(), body))
        return self.machines[machine].apply(body)

    async def fresh(self) -> int:
        """See `StateLog.fresh`."""
        began_s = now_s()
        await skip(self.delay_s)
        if self.errors:
            raise self.errors.pop(0)
        self.proofs += 1
        self.proved_s = began_s
        self.on_fresh()
        return 1

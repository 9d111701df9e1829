"""Groups are shown without a proof to dashboards, which ask often."""

from __future__ import annotations

from tests.unit.test_group_coordinator import Hosted, hosted


def test_groups_are_shown_without_a_proof_to_those_who_ask_for_none() -> None:
    """A dashboard asks each 2 s: each proof would be an entry of the log."""

    async def work(made: Hosted) -> None:
        await made.join("a")
        proofs = made.log.proofs
        assert await made.coordinator.groups(proven=False) == ["g"]
        assert (await made.coordinator.describe("g", proven=False)).members.keys() == {"a"}
        assert made.log.proofs == proofs
        await made.coordinator.groups()
        await made.coordinator.describe("g")
        assert made.log.proofs == proofs + 2

    hosted(work)

"""Which member of a group shall read which partition: pure, balanced, sticky."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memq.topic import ReadPartition


def balance(
    wanted: Mapping[str, Sequence[ReadPartition]], kept: Mapping[ReadPartition, str]
) -> dict[ReadPartition, str]:
    """Return a member for each wanted partition, starting from the present holders (`kept`).

    Each step lowers the sum of the squared loads, so it ends; when all members want the same partitions, their
    loads differ by one at most. Partitions without a holder move first: that costs nobody anything. The same
    input gives the same answer, whatever the order of the mappings.
    """
    wanters: dict[ReadPartition, list[str]] = {}
    for member in sorted(wanted):
        for partition in wanted[member]:
            wanters.setdefault(partition, []).append(member)
    partitions = sorted(wanters)
    owners = {partition: kept[partition] for partition in partitions if kept.get(partition) in wanters[partition]}
    loads = dict.fromkeys(sorted(wanted), 0)
    for owner in owners.values():
        loads[owner] += 1
    homeless = [partition for partition in partitions if partition not in owners]
    for partition in homeless:
        owners[partition] = _lightest(wanters[partition], loads)
        loads[owners[partition]] += 1
    order = homeless + [partition for partition in partitions if partition in kept]
    fair = -(-len(partitions) // max(len(loads), 1))
    for limit in (fair, 0):  # who has more than a fair share gives first: else one that has just enough would give too
        while _level(order, wanters, owners, loads, limit):
            pass
    return owners


def _lightest(members: Sequence[str], loads: Mapping[str, int]) -> str:
    return min(members, key=lambda member: (loads[member], member))


def _level(
    order: Sequence[ReadPartition],
    wanters: Mapping[ReadPartition, Sequence[str]],
    owners: dict[ReadPartition, str],
    loads: dict[str, int],
    limit: int,
) -> bool:
    """Move partitions whose owner has more than `limit`, and two more than another that wants it.

    Return whether one moved.
    """
    moved = False
    if max(loads.values(), default=0) - min(loads.values(), default=0) <= 1:
        return False
    for partition in order:
        if loads[owners[partition]] <= limit:
            continue
        light = _lightest(wanters[partition], loads)
        if loads[owners[partition]] - loads[light] > 1:
            loads[owners[partition]] -= 1
            loads[light] += 1
            owners[partition] = light
            moved = True
    return moved

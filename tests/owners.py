"""Owners of partitions and the governor, by the brokers' own answers; waits until these settle."""

from __future__ import annotations

import memq
from memq.errors import RetryableError
from tests.load import PARTITIONS, TOPIC, Sender
from tests.processes import BrokerProcess

Owners = dict[int, tuple[str, int]]


def owners_of(broker: BrokerProcess) -> Owners:
    """Return the owner and the epoch of each partition, as a broker knows them."""
    with memq.Admin(broker.address) as admin:
        return {owner.partition: (owner.broker, owner.epoch) for owner in admin.topic(TOPIC).owners}


def settled(sender: Sender, *brokers: BrokerProcess) -> Owners:
    """Wait until owners and epochs stay, and all of these brokers know the same: each partition's owner opened it.

    One broker alone may not yet know what the governor has just changed.
    """
    found: list[Owners] = []
    while True:
        before, found = found, [owners_of(broker) for broker in brokers]
        if before == found and all(owners == found[0] for owners in found):
            return found[0]
        sender.wait_for_all(20)


def owner_of(partition: int, owners: Owners, brokers: list[BrokerProcess]) -> tuple[BrokerProcess, BrokerProcess]:
    """Return the broker that owns a partition, and another one."""
    name = owners[partition][0]
    owner = next(broker for broker in brokers if broker.name == name)
    return owner, next(broker for broker in brokers if broker is not owner)


def next_victim(
    number: int, sender: Sender, brokers: list[BrokerProcess]
) -> tuple[BrokerProcess, BrokerProcess, Owners, list[int]]:
    """Return an owner, another broker, who owns what now that it has settled, and what that owner owns of it."""
    before = settled(sender, *brokers)
    victim, witness = owner_of(number % PARTITIONS, before, brokers)
    return victim, witness, before, owned_by(victim, before)


def owned_by(owner: BrokerProcess, owners: Owners) -> list[int]:
    """Return the partitions of a broker."""
    return [partition for partition, (name, _) in owners.items() if name == owner.name]


def wait_for_takeover(sender: Sender, witness: BrokerProcess, before: Owners, lost: list[int]) -> Owners:
    """Wait until others have opened the partitions; return the owners."""

    def taken_over() -> bool:
        found = owners_of(witness)
        return all(found[each][0] != before[each][0] and found[each][1] > before[each][1] for each in lost)

    sender.wait_until(taken_over)
    return owners_of(witness)


def governors(brokers: list[BrokerProcess]) -> dict[str, list[str]]:
    """Return for each broker of a whole cluster who governs, as it knows; nothing while one is missing."""
    found = {}
    for broker in brokers:
        try:
            with memq.Admin(broker.address) as admin:
                listed = admin.brokers()
        except RetryableError:  # it has not found its coordinator again
            return {}
        if len(listed) != len(brokers):
            return {}
        found[broker.name] = [each.broker for each in listed if each.governs]
    return found


def governor_of(brokers: list[BrokerProcess], sender: Sender) -> BrokerProcess:
    """Wait until all brokers are there and agree on one governor, and return it."""
    found: list[list[str]] = []

    def agreed() -> bool:
        found[:] = governors(brokers).values()
        return bool(found) and len(found[0]) == 1 and found.count(found[0]) == len(found)

    sender.wait_until(agreed)
    return next(broker for broker in brokers if broker.name == found[0][0])

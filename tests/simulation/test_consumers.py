"""The rule about damage that a simulated consumer reports."""

from __future__ import annotations

from memq.errors import CorruptDataError
from memq.simulation.world.world import World
from tests.simulation.consumers import is_explained

DAMAGE = CorruptDataError("block 0 of object 'topics/t/1' at 0:3:0 of topic 't': block has another checksum")


def test_damage_is_explained_by_a_wrong_answer_for_the_named_object_only() -> None:
    with World(1) as world:
        node = world.add_node("consumer")
        node.misread["topics/t/2"] += 1
        assert not is_explained(DAMAGE, world.misreads)
        node.misread["topics/t/1"] += 1
        assert is_explained(DAMAGE, world.misreads)


def test_a_wrong_answer_to_a_process_that_is_dead_explains_damage() -> None:
    """A broker may have read the object for the consumer, and died before the error arrived."""
    with World(1) as world:
        broker = world.add_node("broker")
        broker.misread["topics/t/1"] += 1
        broker.kill()
        world.add_node("broker")
        assert is_explained(DAMAGE, world.misreads)


def test_damage_without_an_object_is_never_explained() -> None:
    with World(1) as world:
        world.add_node("consumer").misread["topics/t/1"] += 1
        assert not is_explained(CorruptDataError("pointer of 7 bytes can't be read"), world.misreads)

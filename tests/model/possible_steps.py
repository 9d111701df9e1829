"""Which steps of the ownership model are possible at a moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.model.parts import Broker, Client, Forwarder, Producer

if TYPE_CHECKING:
    from tests.model.ownership import Model

Action = tuple[str, int, int]  # what, broker, client or place, and more
IN_FLIGHT_MAX = 2  # blocks of a producer
OPEN, STORED = "open", "stored"


def actions(model: Model) -> list[Action]:
    """Return the steps that are possible now."""
    rules = model.rules
    steps: list[Action] = []
    if model.now < rules.ticks_max:
        steps.append(("tick", 0, 0))
    for number, producer in enumerate(model.producers):
        _add_producer(model, number, producer, steps)
    for number, broker in enumerate(model.brokers):
        if model.forwarders[number].held:
            _add_forwarder(model, number, model.forwarders[number], steps)
        _add_broker(model, number, broker, steps)
    for place, connection in enumerate(model.connections):
        if connection.up and connection.taken:
            owner = model.brokers[connection.broker]
            if connection.up[0][0] != "begin" or owner.beginning is None:
                steps.append(("take", connection.broker, place))
            if owner.state == "owner" and connection.up[0][0] == "write":
                steps.append(("throttle", connection.broker, place))
    seen: list[tuple[int, int]] = []
    for place, flight in enumerate(model.flights):
        if (flight.broker, flight.connection) not in seen:
            seen.append((flight.broker, flight.connection))
            steps += ("land", place, 0), ("refuse landed", place, 0), ("drop", place, 0)
    if model.foreign < rules.foreign_max:
        steps.append(("foreign", 0, 0))
    return steps


def _add_client(model: Model, number: int, client: Client, steps: list[Action]) -> None:
    if client.connects < model.rules.connections_max:
        kind = "connect" if client.connection is None else "reconnect"
        steps += [(kind, broker, number) for broker in range(model.rules.brokers)]
    if client.connection is not None and client.connection.down:
        steps.append(("hear", number, 0))


def _add_producer(model: Model, number: int, producer: Producer, steps: list[Action]) -> None:
    if producer.fenced:
        return
    _add_client(model, number, producer, steps)
    left = [place for place, block in enumerate(producer.blocks) if block.state == "open"]
    if not left:
        return
    if producer.connection is not None and producer.connection.ready:
        in_flight = sum(place < producer.next for place in left)
        if not model.rules.oldest_first or in_flight < min(IN_FLIGHT_MAX, len(left)):
            steps.append(("send", number, 0))
    if 0 <= producer.blocks[left[0]].first_sent < model.now - model.rules.delivery_ticks:
        steps.append(("give up block", number, 0))


def _add_forwarder(model: Model, broker: int, forwarder: Forwarder, steps: list[Action]) -> None:
    number = len(model.producers) + broker
    _add_client(model, number, forwarder, steps)
    if model.now > forwarder.settled:
        steps.append(("look", broker, 0))
    if forwarder.connection is not None and forwarder.connection.ready and forwarder.absent is not None:
        steps.append(("send", number, 0))


def _add_broker(model: Model, number: int, broker: Broker, steps: list[Action]) -> None:
    rules = model.rules
    lost_opening = broker.state == "opening" and not broker.requests
    if model.openings < rules.openings_max and (broker.state == "idle" or lost_opening):
        steps.append(("claim", number, 0))
    may_publish = model.publishes < rules.publishes_max
    if broker.state == "claimed" and may_publish:
        steps.append(("open", number, 0))
    if broker.state == "owner":
        _add_owner(model, number, broker, steps, may_publish=may_publish)
    if broker.reading is not None:
        steps.append(("read answer", number, 0))
    if broker.requests:
        steps.append(("time out", number, 0))
        if any(request.number == broker.answers[0][0] for request in broker.requests if broker.answers):
            steps.append(("answer", number, 0))
    has_what_a_crash_ends = broker.state != "idle" or model.forwarders[number].held
    if has_what_a_crash_ends and model.crashes < rules.crashes_max:
        steps.append(("crash", number, 0))


def _add_owner(model: Model, number: int, broker: Broker, steps: list[Action], *, may_publish: bool) -> None:
    rules = model.rules
    if broker.ring and broker.ring[-1].state == OPEN:
        steps.append(("store", number, 0))
    if broker.ring:
        steps.append(("give up ring", number, 0))
    in_flight_max = 1 if rules.one_in_flight else 2
    may_publish = may_publish and (not rules.refuse or model.now - broker.proof <= rules.stale_ticks)
    if may_publish and not broker.unread and len(broker.requests) < in_flight_max and broker.reading is None:
        head = next((batch for batch in broker.ring if batch.state in (OPEN, STORED)), None)
        if head is not None and head.state == STORED:
            steps.append(("publish", number, 0))
        beginning = broker.beginning
        waits = beginning is not None and rules.ring_without and broker.holds(beginning.role.source)
        if beginning is not None and beginning.offset < 0 and not waits:
            steps.append(("state", number, 0))
    if broker.reading is None:
        steps.append(("read", number, 0))

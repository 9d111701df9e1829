"""The connection's states: every (state, side, api) is in the table, or a ProtocolError."""

from __future__ import annotations

from itertools import product

import pytest

from memq.errors import ProtocolError
from memq.protocol.connection import ALLOWED, NEXT, ConnectionState, Conversation, Side
from memq.protocol.frames import Api

ROUTES: dict[ConnectionState, list[tuple[Side, Api]]] = {
    ConnectionState.GREETING: [],
    ConnectionState.AUTHENTICATING: [(Side.CLIENT, Api.HELLO), (Side.BROKER, Api.AUTHENTICATE)],
    ConnectionState.READY: [(Side.CLIENT, Api.HELLO), (Side.BROKER, Api.HELLO)],
    ConnectionState.DRAINING: [(Side.CLIENT, Api.HELLO), (Side.BROKER, Api.HELLO), (Side.BROKER, Api.DRAINING)],
    ConnectionState.CLOSED: [(Side.BROKER, Api.ERROR)],
}


def conversation_in(state: ConnectionState) -> Conversation:
    conversation = Conversation()
    for side, api in ROUTES[state]:
        conversation.sent(side, api)
    assert conversation.state is state
    return conversation


@pytest.mark.parametrize(("state", "side", "api"), list(product(ConnectionState, Side, range(21))))
def test_all_that_may_be_said_and_all_that_may_not(state: ConnectionState, side: Side, api: int) -> None:
    conversation = conversation_in(state)
    if api in ALLOWED[state][side]:
        conversation.sent(side, api)
        assert conversation.state is NEXT.get((state, side, Api(api)), state)
    else:
        with pytest.raises(ProtocolError, match=f"{side.name.lower()} sent .* in state {state.name}"):
            conversation.sent(side, api)
        assert conversation.state is state


@pytest.mark.parametrize("state", ConnectionState)
def test_every_state_can_close_and_then_nothing_may_be_said(state: ConnectionState) -> None:
    conversation = conversation_in(state)
    conversation.close()
    for side, api in product(Side, Api):
        with pytest.raises(ProtocolError, match="CLOSED"):
            conversation.sent(side, api)


def test_a_login_is_between_the_hellos() -> None:
    conversation = conversation_in(ConnectionState.AUTHENTICATING)
    conversation.sent(Side.CLIENT, Api.AUTHENTICATE)
    conversation.sent(Side.BROKER, Api.HELLO)
    assert conversation.state is ConnectionState.READY


def test_hello_is_said_once() -> None:
    conversation = Conversation()
    conversation.sent(Side.CLIENT, Api.HELLO)
    with pytest.raises(ProtocolError, match="HELLO twice"):
        conversation.sent(Side.CLIENT, Api.HELLO)
    conversation.sent(Side.BROKER, Api.HELLO)
    for side in Side:
        with pytest.raises(ProtocolError, match="HELLO in state READY"):
            conversation.sent(side, Api.HELLO)


def test_a_draining_broker_answers_and_never_takes_it_back() -> None:
    conversation = conversation_in(ConnectionState.DRAINING)
    conversation.sent(Side.BROKER, Api.DRAINING)
    conversation.sent(Side.CLIENT, Api.WRITE)
    conversation.sent(Side.BROKER, Api.ACK)
    assert conversation.state is ConnectionState.DRAINING


def test_every_api_is_somebodys_and_every_step_of_the_table_is_allowed() -> None:
    said = {api for sides in ALLOWED.values() for apis in sides.values() for api in apis}
    assert said == set(Api)
    for state, side, api in NEXT:
        assert api in ALLOWED[state][side]
    assert set(ALLOWED) == set(ConnectionState)
    assert not ALLOWED[ConnectionState.CLOSED][Side.CLIENT] | ALLOWED[ConnectionState.CLOSED][Side.BROKER]

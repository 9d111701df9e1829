"""Answers requests about transactions; any broker takes them, and asks the coordinator."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from memq.broker.api import Answer, Call
from memq.broker.api.service_lookup import HOME_S, ask_all_services, find_service, forward
from memq.broker.api.stream_requests import checked_sequence, producer_id_of
from memq.broker.holds.staged_parts import StagedParts
from memq.broker.partitions import Partitions
from memq.broker.service_partitions.hosts import ServiceHosts
from memq.broker.services import BROKER_PROGRAM, Services
from memq.errors import InvalidRequestError, MemqError, NotFoundError, RetryableError, TooLargeError, TopicSealedError
from memq.format.blocks.header import check_block, scope_of
from memq.format.held_object import HeldLane, HoldId, Target
from memq.format.staged_manifest import TRANSACTIONS_WRITER
from memq.groups.remote import committed_of
from memq.holds.storing import NewHold
from memq.limits import (
    HOLDS_PER_REQUEST_MAX,
    STAGED_PARTS_MAX,
    TIME_MS_END,
    TRANSACTION_NOTE_BYTES_MAX,
    TRANSACTION_TIMEOUT_MS_MAX,
    TRANSACTION_TIMEOUT_MS_MIN,
)
from memq.notification.remote import ref_of
from memq.protocol.admin_messages import AdminAnswer
from memq.protocol.link import Link
from memq.protocol.transaction_messages import (
    AnswerUndecided,
    AskUndecided,
    AwaitTransaction,
    BeginTransactions,
    EndTransaction,
    HoldStagedParts,
    HoldTransaction,
    ListTransactions,
    PrepareTransaction,
    SettleTransaction,
    WireOpenTransaction,
    WireQuestion,
    WireStagedPart,
    WireTransaction,
    WireTransactionBlock,
)
from memq.topic import Topic, check_group, check_name, check_resource_name, is_internal
from memq.transactions.coordinator import Question, TransactionCoordinator, TransactionState, ask_again_ms
from memq.transactions.machine import PositionMoves, TransactionalId, lane_of, moves_of

MOVED_POSITIONS_MAX = 256  # positions that one commit moves: they lie in one entry of the state log


class TransactionRequests:
    """Answers requests about transactions, of producers and operators."""

    def __init__(self, services: Services, partitions: Partitions, hosts: ServiceHosts) -> None:
        """`hosts` has the services on state logs."""
        self._services = services
        self._partitions = partitions
        self._hosts = hosts

    async def begin(self, call: Call[BeginTransactions]) -> Answer:
        """Begin a new instance of a transactional producer."""
        ask = call.ask
        id_ = _id(ask.name, ask.group)
        if not TRANSACTION_TIMEOUT_MS_MIN <= ask.timeout_ms <= TRANSACTION_TIMEOUT_MS_MAX:
            bounds = f"{TRANSACTION_TIMEOUT_MS_MIN} to {TRANSACTION_TIMEOUT_MS_MAX}"
            raise InvalidRequestError(f"time-out of transactions is {ask.timeout_ms} ms, {bounds} are allowed")
        coordinator = await self._coordinator(call, id_)
        if isinstance(coordinator, Link):
            return await forward(coordinator, ask)
        return AdminAnswer(transactional=await coordinator.begin(id_, int(ask.token, 16), ask.timeout_ms))

    async def hold(self, call: Call[HoldTransaction]) -> Answer:
        """Hold blocks of a transaction; answer when that is in the state log."""
        ask, named = call.ask, call.ask.transaction
        if len(ask.blocks) > HOLDS_PER_REQUEST_MAX:
            raise TooLargeError(f"{len(ask.blocks)} blocks in one request, {HOLDS_PER_REQUEST_MAX} are allowed")
        holds = [await self._new_hold(named, each) for each in ask.blocks]
        id_ = _id(named.name, named.group)
        coordinator = await self._coordinator(call, id_)
        if isinstance(coordinator, Link):
            return await forward(coordinator, ask)
        await coordinator.hold(id_, named.instance, named.number, holds)
        return AdminAnswer()

    async def hold_staged(self, call: Call[HoldStagedParts]) -> Answer:
        """Hold parts of a transaction that lie in staged objects; answer when that is in the state log."""
        ask, named = call.ask, call.ask.transaction
        if len(ask.parts) > STAGED_PARTS_MAX:
            raise TooLargeError(f"{len(ask.parts)} parts in one request, {STAGED_PARTS_MAX} are allowed")
        check_name(ask.writer, "writer", internal=ask.writer == TRANSACTIONS_WRITER)
        id_ = _id(named.name, named.group)
        coordinator = await self._coordinator(call, id_)
        if isinstance(coordinator, Link):
            return await forward(coordinator, ask)
        parts = await StagedParts.read(self._services, ask.writer, ask.batch_id)
        lanes = [await self._lane(parts, named, each) for each in ask.parts]
        await coordinator.hold_staged(id_, named.instance, named.number, parts.key, lanes)
        parts.check_age(self._services)  # too late: the producer rolls back
        return AdminAnswer()

    async def _lane(self, parts: StagedParts, named: WireTransaction, each: WireStagedPart) -> HeldLane:
        topic = await self._writable(each.topic, each.topic_id, each.partition)
        hold = HoldId(producer_id_of(each.hold.producer), checked_sequence(each.hold.first))
        target = Target(topic.name, topic.id, each.partition)
        return parts.lane(target, lane_of(named.instance, named.number), hold, each.records)

    async def end(self, call: Call[EndTransaction]) -> Answer:
        """Commit a transaction, or roll it back; answer whether it is committed."""
        ask, named = call.ask, call.ask.transaction
        id_ = _id(named.name, named.group)
        if named.number < 1 or ask.blocks < 0:
            raise InvalidRequestError(f"transaction {named.number} with {ask.blocks} blocks is not possible")
        coordinator = await self._coordinator(call, id_)
        if isinstance(coordinator, Link):
            return await forward(coordinator, ask)
        if not ask.commit:
            reason = "was rolled back by its producer"
            return AdminAnswer(committed=not await coordinator.abort(id_, named.instance, named.number, reason))
        try:
            moves = await self._moves(ask) if ask.after else None
        except InvalidRequestError as error:
            await coordinator.refuse(id_, named.instance, named.number, error)
        else:
            await coordinator.commit(id_, named.instance, named.number, ask.blocks, moves)
        return AdminAnswer(committed=True)

    async def prepare(self, call: Call[PrepareTransaction]) -> Answer:
        """Prepare a transaction: all of its blocks are held, and only a decision ends it."""
        ask, named = call.ask, call.ask.transaction
        id_ = _id(named.name, named.group)
        check_resource_name(ask.producer_group, "producer group")
        if len(ask.note) > TRANSACTION_NOTE_BYTES_MAX:
            text = f"a note of {len(ask.note)} bytes, {TRANSACTION_NOTE_BYTES_MAX} are allowed"
            raise TooLargeError(f"transaction {named.number} has {text}")
        if named.number < 1 or ask.blocks < 0 or not 0 <= ask.began_ms < TIME_MS_END:
            raise InvalidRequestError(
                f"transaction {named.number} with {ask.blocks} blocks, begun at {ask.began_ms}, is not possible"
            )
        if named.group:
            raise InvalidRequestError("a transaction that moves positions of a group can't be prepared")
        coordinator = await self._coordinator(call, id_)
        if isinstance(coordinator, Link):
            return await forward(coordinator, ask)
        numbers = named.instance, named.number, ask.blocks
        await coordinator.prepare(
            id_, *numbers, producer_group=ask.producer_group, note=ask.note, began_ms=ask.began_ms
        )
        return AdminAnswer()

    async def ask(self, call: Call[AskUndecided]) -> Answer:
        """Return what a producer group is to decide; for another broker, from the coordinators here."""
        group = check_resource_name(call.ask.producer_group, "producer group")
        others = await self._others() if call.connection.program != BROKER_PROGRAM else []
        answers = await asyncio.gather(*(self._questions_at(address, call.ask) for address in others))
        found = [question for answer in answers for question in answer]
        for coordinator in self._hosts.open_here(self._hosts.transactions):  # last: a question is given once
            found += [_question(each) for each in coordinator.questions(group, call.ask.transactional_id)]
        again_ms = ask_again_ms(self._services.settings.transaction_check_interval_ms)
        return AdminAnswer(questions=found, ask_again_ms=again_ms)

    async def answer(self, call: Call[AnswerUndecided]) -> Answer:
        """End a transaction as its producer group says; answer whether it is committed."""
        ask, named = call.ask, call.ask.transaction
        id_ = _id(named.name, named.group)
        group = check_resource_name(ask.producer_group, "producer group")
        coordinator = await self._coordinator(call, id_)
        if isinstance(coordinator, Link):
            return await forward(coordinator, ask)
        numbers = named.instance, named.number
        return AdminAnswer(committed=await coordinator.answer(id_, *numbers, producer_group=group, commit=ask.commit))

    async def until_visible(self, call: Call[AwaitTransaction]) -> Answer:
        """Wait until all records of a committed transaction are in their logs; answer whether that is so."""
        named = call.ask.transaction
        coordinator = await self._coordinator(call, _id(named.name, named.group))
        if isinstance(coordinator, Link):
            return await forward(coordinator, call.ask)
        return AdminAnswer(visible=await coordinator.until_visible(named.instance, named.number))

    async def list_open(self, call: Call[ListTransactions]) -> Answer:
        """Return the open transactions; for another broker, those whose coordinators are here."""

        async def open_at(coordinator: TransactionCoordinator) -> list[WireOpenTransaction]:
            return [_wire(each) for each in await coordinator.transactions(proven=call.ask.proven)]

        found, covered = await ask_all_services(
            self._hosts, self._hosts.transactions, call, open_at, lambda answer: answer.transactions
        )
        return AdminAnswer(transactions=sorted(found, key=lambda each: (each.name, each.group)), covered=covered)

    async def settle(self, call: Call[SettleTransaction]) -> Answer:
        """Commit or roll back the open transaction of a producer, for an operator."""
        ask = call.ask
        id_ = _id(ask.name, ask.group)
        coordinator = await self._coordinator(call, id_)
        if isinstance(coordinator, Link):
            return await forward(coordinator, ask)
        await coordinator.settle(id_, commit=ask.commit, lane=ask.transaction)
        return AdminAnswer()

    # ---- inside ----------------------------------------------------------------------------------

    async def _questions_at(self, address: str, ask: AskUndecided) -> list[WireQuestion]:
        """Return the questions of another broker; none if it does not answer soon, or does not know them.

        The others have given theirs by then, and no other member gets those: so no broker is waited for long.
        """
        try:
            return (await forward(await self._hosts.link(address), ask, timeout_s=HOME_S)).questions
        except MemqError:
            return []

    async def _others(self) -> list[str]:
        """Return the addresses of the other brokers with coordinators.

        A service partition without an owner keeps its questions, and so does one that is being opened here.
        """
        topic = await self._hosts.service_topic(create=False)
        if topic is None:
            return []
        homes = await asyncio.gather(*(self._home_of(topic, part.partition) for part in topic.partitions))
        return list(dict.fromkeys(home for home in homes if home))

    async def _home_of(self, topic: Topic, partition: int) -> str:
        """Return the address of the other broker with a service partition; "" if it is here, or nowhere now."""
        with suppress(RetryableError, TimeoutError):
            async with asyncio.timeout(HOME_S):
                home = await self._hosts.service_in(self._hosts.transactions, topic, partition)
                return home if isinstance(home, str) else ""
        return ""

    async def _new_hold(self, named: WireTransaction, each: WireTransactionBlock) -> NewHold:
        topic = await self._writable(each.topic, each.topic_id, each.partition)
        header = check_block(each.block, scope_of(topic.id_bytes, each.partition))
        target = Target(topic.name, topic.id, each.partition)
        hold = HoldId(header.producer_id, header.first_sequence)
        return NewHold(hold, header.next_sequence, target, lane_of(named.instance, named.number), 0, each.block)

    async def _writable(self, name: str, topic_id: str, partition: int) -> Topic:
        """Return the topic of a partition to which a transaction may write. Raises: InvalidRequestError."""
        topic = await self._partitions.current_topic(name, topic_id)
        if is_internal(topic.name):
            raise InvalidRequestError(f"topic '{topic.name}' is memq's own: a transaction can't write to it")
        if topic.sealed_ms:
            raise TopicSealedError(f"topic '{topic.name}' is sealed: it takes no records")
        if not 0 <= partition < len(topic.partitions):
            count = len(topic.partitions)
            raise NotFoundError(f"topic '{topic.name}' has {count} partitions, none is {partition}")
        return topic

    async def _moves(self, ask: EndTransaction) -> PositionMoves:
        """Return the moves of positions in a request.

        Raises: InvalidRequestError, NotFoundError, TooLargeError.
        """
        if not ask.transaction.group:
            raise InvalidRequestError("this transactional producer has no group, and moves no positions")
        if len(ask.after) > MOVED_POSITIONS_MAX:
            raise TooLargeError(f"a transaction moves {len(ask.after)} positions, {MOVED_POSITIONS_MAX} are allowed")
        before, after = committed_of(ask.before), committed_of(ask.after)
        if before.keys() - after.keys():
            raise InvalidRequestError("a transaction names a former position without a new one")
        for partition in after:
            topic = await self._partitions.current_topic(partition.topic, partition.topic_id)
            if not 0 <= partition.partition < topic.read_partitions:
                raise NotFoundError(f"topic '{topic.name}' has no read partition {ref_of(partition).partition}")
        return moves_of(ask.member, ask.generation, before, after)

    async def _coordinator(self, call: Call[Any], id_: TransactionalId) -> TransactionCoordinator | Link:
        """Return the coordinator of an id (T1), or a link to its broker. Raises: as `find_service`."""
        return await find_service(self._hosts, self._hosts.transactions, id_.group or id_.name, call)


def _id(name: str, group: str) -> TransactionalId:
    check_resource_name(name, "transactional id")
    if group:
        check_group(group)
    return TransactionalId(name, group)


def _wire(found: TransactionState) -> WireOpenTransaction:
    made = WireOpenTransaction(
        name=found.id.name,
        group=found.id.group,
        instance=found.instance,
        number=found.number,
        open_ms=found.open_ms,
        timeout_ms=found.timeout_ms,
        blocks=found.blocks,
    )
    if found.prepared is not None:
        made.producer_group = found.prepared.producer_group
        made.tries, made.parked = found.prepared.tries, found.prepared.parked
    return made


def _question(asked: Question) -> WireQuestion:
    found = asked.transaction
    named = WireTransaction(name=found.id.name, group=found.id.group, instance=found.instance, number=found.number)
    topics = list(asked.topics)
    return WireQuestion(transaction=named, topics=topics, note=found.note, began_ms=found.began_ms, tries=found.tries)

"""An operator who withdraws permissions and gives them back, and the checks of what brokers decide by.

A process with a certificate of its own, the ward, writes to a topic of the operator. Consumers, workers and producers
of the run lose permissions, too. Each error of theirs is one of many, after which they continue.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress

from memq.client.admin import AsyncAdmin
from memq.client.producer.producer import AsyncProducer
from memq.errors import DeniedError, MemqError, NotReadyError
from memq.permissions import AccessRule, Permission, Resource, ResourceKind, RuleSet
from memq.runtime.runtime import Runtime
from memq.simulation.ports.cloud import Doors
from memq.simulation.world.node import SimNode
from memq.topic import Topic
from tests.simulation.rule_sets import KNOWN_S, PROBES, WITHDRAWN, RuleHistory, Wish
from tests.simulation.topic_churn import TopicChurn

ROUNDS = 5  # of one life
WARD = "ward-0"
LOOK_S = 0.2
SLACK_S = 0.3  # until a broker decides by an answer, and until the history has a change
EXCUSED_S = KNOWN_S + 3.0  # for which a broker may know an older change, after the coordinator did not answer
WITHOUT_S_MAX = 9.0
WITH_S_MAX = 4.0
AT_ONCE_MAX = 3  # permissions that are withdrawn by one change
SENT_S_MAX = 0.3
KILL_RATE = 0.05  # of the ward, at each look


class RulesLife(TopicChurn):
    """One life of the operator. A permission has no effect 5 s after it was withdrawn, until it is given back."""

    names = ("granted", "granted")
    _history: RuleHistory
    _topic: Topic
    _acked_s = -math.inf  # when the last acked record of the ward was sent

    async def run(self, rounds: int) -> None:
        """Withdraw and give back so often."""
        self._cluster.end((WARD,))  # of the life before
        self._history, self._first_s = RuleHistory(), dict[tuple[str, int], float]()
        async with AsyncAdmin(self._brokers, runtime=self._runtime) as admin:
            await self._change(admin, remove=WITHDRAWN)
            self._topics += 1
            self._topic = await self._made(admin, self.names[0])
            group = f"readers of {self._life}".replace(" ", "-")
            reading = asyncio.create_task(self._read(group, [(self._topic, self._checker)]), name="read")
            watching = asyncio.create_task(self._watch(), name="watch")
            for _ in range(rounds):
                withdrawn = self._draw.sample(WITHDRAWN, self._draw.randint(1, AT_ONCE_MAX))
                await asyncio.sleep(self._draw.uniform(0, WITH_S_MAX))
                await self._change(admin, add=withdrawn)
                await asyncio.sleep(self._draw.uniform(0, WITHOUT_S_MAX))
                await self._change(admin, remove=withdrawn)
            granted_s = self._cluster.world.now
            while self._acked_s < granted_s or not self._is_drained(self._topic, group):  # noqa: ASYNC110  no event
                await asyncio.sleep(LOOK_S)
            self._cluster.end((WARD,))
            watching.cancel()
            self._leaving[self._topic.id] = None
            await self._delete(admin, self._topic.name)
            reading.cancel()
            await asyncio.gather(watching, reading, return_exceptions=True)

    async def _change(
        self, admin: AsyncAdmin, *, add: Sequence[AccessRule] = (), remove: Sequence[AccessRule] = ()
    ) -> None:
        """Change the rules, and again until the coordinator has them: a stale answer may hide that they are missing."""
        while set(add) - set(self._stored.rules) or set(remove) & set(self._stored.rules):
            self._note()
            try:
                await admin.change_permissions(add=add, remove=remove)
            except MemqError:
                await self._rest()
        self._note()  # before the next change, so that the history has each of them

    def _note(self) -> None:
        self._history.note(self._cluster.world.now, self._stored)

    @property
    def _stored(self) -> RuleSet:
        return self._cluster.cloud.cluster.registry.rules

    # ---- checks ------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Note the rules, keep the ward alive, and compare what each broker decides with the rules."""
        while True:
            self._note()
            self._cluster.keep_alive(WARD, self._ward_main, KILL_RATE * LOOK_S, self._draw)
            for name in list(self._cluster.live):
                self._check_broker(name)
            await asyncio.sleep(LOOK_S)

    def _check_broker(self, name: str) -> None:
        """Check that a broker decides by rules that it must know; it may know newer ones."""
        world, broker = self._cluster.world, self._cluster.live[name]
        node = world.nodes[name]
        since_s = self._since_s(name)
        if not node.alive or node.paused_until >= world.now or since_s == -math.inf:
            return
        for wish in PROBES:
            resource = Resource(ResourceKind(wish.kind), wish.name)
            try:
                found = broker.services.permissions.may(wish.principal, Permission(wish.permission), resource)
            except NotReadyError:
                return
            if not self._is_possible(wish, allowed=found, since_s=since_s):
                word = "allowed" if found else "denied"
                world.fail(f"{name} has {word} {wish}, which the rules since {since_s:.1f} s do not say")

    def _is_possible(self, wish: Wish, *, allowed: bool, since_s: float) -> bool:
        known = self._history.between(since_s - SLACK_S, self._cluster.world.now)
        return any(wish.is_denied(rules) is not allowed for rules in known)

    def _since_s(self, name: str) -> float:
        """Return the time from which on a broker must know all rules."""
        world, node = self._cluster.world, self._cluster.world.nodes[name]
        door = self._cluster.doors[name].coordinator
        rules = door.own_rules
        first_s = self._first_s.setdefault((name, node.index), world.now)
        asked_s = rules.read_s if world.now - rules.answered_s > SLACK_S else -math.inf
        bad_s = max(rules.failed_s, node.paused_until, self._blocked_until(name), first_s)
        return max(asked_s, world.now - KNOWN_S if world.now - bad_s > EXCUSED_S else -math.inf)

    def _blocked_until(self, name: str) -> float:
        return self._cluster.doors[name].callers[2].blocked_until

    # ---- the ward ----------------------------------------------------------------------------------

    async def _ward_main(self, node: SimNode, runtime: Runtime, _doors: Doors) -> None:
        """Write records until the process dies."""
        while True:
            producer = AsyncProducer(
                self._brokers,
                linger_ms=node.random.choice([0, 5]),
                delivery_timeout_ms=self._topic.settings.delivery_timeout_ms,
                runtime=runtime,
            )
            with suppress(DeniedError):
                while self._topic.id not in self._leaving:
                    await self._send(producer, node)
            with suppress(MemqError):
                await producer.close()
            await asyncio.sleep(node.random.uniform(0.05, 0.5))

    async def _send(self, producer: AsyncProducer, node: SimNode) -> None:
        """Send one record. Raises: DeniedError."""
        stream, partition = f"{node.name}.{node.index}", 0
        self._sent += 1
        value, sent_s = f"{stream} {partition} {self._sent} ".encode(), self._cluster.world.now
        self._checker.sent(stream, partition, self._sent, value)
        try:
            ack = await (await producer.send(self._topic.name, value, partition=partition))
        except MemqError as error:
            self._check_exists(error, self._topic)
            self._checker.give_up(value)
            if isinstance(error, DeniedError):
                raise
        else:
            self.acked(self._topic, value, ack)
            self._check_allowed(sent_s)
            self._acked_s = sent_s
        await asyncio.sleep(node.random.uniform(0, SENT_S_MAX))

    def _check_allowed(self, sent_s: float) -> None:
        """Check that a record that is acked was allowed within 5 s of its send, if each broker knew all rules."""
        since_s = min((self._since_s(name) for name in self._cluster.live), default=-math.inf)
        began_s = min(since_s, sent_s - KNOWN_S)
        if since_s > -math.inf and not self._is_possible(
            Wish(WARD, "write", "topic", self._topic.name), allowed=True, since_s=began_s
        ):
            self._cluster.world.fail(f"a record that was sent at {sent_s:.1f} s is acked, and was denied for 5 s")

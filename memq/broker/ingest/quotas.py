"""The limits of one broker: a limiter for each topic with a limit, and for each connected client."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from memq.broker.ingest.rate_limit import Limiter, Limiters, RatePerSecond
from memq.runtime.clock import Clock
from memq.topic import Topic

DEFAULT = "default"  # names no client, but all that are not named
CLIENTS_MAX = 10_000  # that are remembered; those that are connected are bounded by connections_max


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """The limits of clients at one broker: named clients, and the default for all others."""

    default: RatePerSecond = field(default_factory=RatePerSecond)
    named: Mapping[str, RatePerSecond] = field(default_factory=dict)

    def of(self, client: str) -> RatePerSecond:
        """Return the limit of a client."""
        return self.named.get(client, self.default)


NO_CLIENT_LIMITS = ClientLimits()


@dataclass(slots=True)
class _Known:
    limiter: Limiter
    connections: int = 0


class Quotas:
    """Finds limiters.

    Those of a topic share its limit by how many of its partitions that take records each one has.
    A client is known by its client id, without one by the host that it comes from; all its connections share a
    limiter, which outlives them, so that coming again brings nothing.
    """

    def __init__(self, clock: Clock, clients: ClientLimits) -> None:
        self._clock = clock
        self._client_limits = clients
        self._topics: dict[str, Limiter] = {}
        self._clients: dict[str, _Known] = {}

    def follow(self, topics: Iterable[Topic], owned: Container[tuple[str, int]]) -> None:
        """Take the limits of topics as they are now.

        `owned`: the partitions, each with its topic id, owned here.
        """
        before, self._topics = self._topics, {}
        now_s = self._clock.monotonic()
        for topic in topics:
            settings = topic.settings
            limit = RatePerSecond(settings.limit_mode, settings.limit_bytes_s, settings.limit_requests_s)
            if not limit.holds:
                continue
            taking = topic.taking
            here = sum((topic.id, part.partition) in owned for part in taking)
            if not here:
                continue
            limiter = before.get(topic.id) or Limiter("topic", topic.name, limit, now_s)
            limiter.change(limit, here / len(taking), now_s)
            self._topics[topic.id] = limiter

    def of_topic(self, topic_id: str) -> Limiters:
        """Return the limiter of a topic, if it has a limit."""
        limiter = self._topics.get(topic_id)
        return () if limiter is None else (limiter,)

    def come(self, client: str) -> Limiters:
        """Return the limiter of a client that connects, if it has a limit; `leave` gives it back."""
        known = self._clients.get(client)
        if known is None:
            limit = self._client_limits.of(client)
            if not limit.holds:
                return ()
            self._forget_idle()
            known = self._clients[client] = _Known(Limiter("client", client, limit, self._clock.monotonic()))
        known.connections += 1
        return (known.limiter,)

    def leave(self, client: str) -> None:
        """Note that a connection of a client has ended."""
        if client in self._clients:
            self._clients[client].connections -= 1

    def limiters(self) -> list[Limiter]:
        """Return all limiters there are."""
        return [*self._topics.values(), *(known.limiter for known in self._clients.values())]

    def clients(self) -> list[tuple[str, RatePerSecond, int, int]]:
        """Return who has a limit: name, limit, connections, and how often it was over.

        `default`: all others, each.
        """
        known = {name: (each.limiter.limit, each.connections, each.limiter) for name, each in self._clients.items()}
        rows = [(name, limit, count, sum(limiter.over.values())) for name, (limit, count, limiter) in known.items()]
        rows += [(name, limit, 0, 0) for name, limit in self._client_limits.named.items() if name not in known]
        return [(DEFAULT, self._client_limits.default, 0, 0), *sorted(rows)]

    def _forget_idle(self) -> None:
        """Forget who left longest ago, when there are too many."""
        if len(self._clients) < CLIENTS_MAX:
            return
        for client in [client for client, known in self._clients.items() if not known.connections]:
            del self._clients[client]

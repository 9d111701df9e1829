"""Topics and groups for those who look after them: blocking calls over the one I/O thread."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from memq.client.admin.aio_admin import AsyncAdmin, GovernorPlan, Settings
from memq.client.admin.group_positions import GroupDescription, Reset
from memq.client.arguments import public_name
from memq.client.background import Background, BlockingClient
from memq.client.consumer.settings import Point
from memq.client.link_pool import CONNECT_TIMEOUT_MS
from memq.client.log_answers import LogAnswers
from memq.protocol.messages import TopicMetadata
from memq.protocol.wire_types import WireBroker, WireClient, WireLoad
from memq.runtime.network import Runtime
from memq.topic import Topic, Totals


class Admin(BlockingClient):
    """Makes, alters and deletes topics; shows, resets and deletes groups; drains brokers. Thread-safe.

    Every method raises UnreachableError when no broker answers for `connect_timeout_ms`, and what the broker says.
    """

    @public_name("Admin")
    def __init__(
        self,
        brokers: str | Sequence[str] | None = None,
        *,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        runtime: Runtime | None = None,
    ) -> None:
        self._core = AsyncAdmin(brokers, connect_timeout_ms=connect_timeout_ms, runtime=runtime)
        self._background = Background("admin", self._core)
        self._closed = False

    def close(self) -> None:
        """Disconnect. Closing twice is fine."""
        self._finish(None)

    def _closing(self, timeout_s: float | None) -> Coroutine[Any, Any, None]:
        return self._core.close()

    @property
    def cluster(self) -> str:
        """The name of the cluster; "" before the first answer."""
        return self._core.cluster

    def create_topic(
        self, name: str, *, partitions: int = 1, settings: Settings | None = None, exist_ok: bool = False
    ) -> Topic:
        """Make a topic and return it; with `exist_ok` an existing one is returned as it is.

        Raises: AlreadyExistsError, InvalidNameError, InvalidRequestError, UnknownSettingError, InvalidSettingError.
        """
        work = self._core.create_topic(name, partitions=partitions, settings=settings, exist_ok=exist_ok)
        return self._background.run(work)

    def topics(self, *, internal: bool = False) -> list[Topic]:
        """Return all topics, by name; memq's own, whose names begin with `_memq`, with `internal` only."""
        return self._background.run(self._core.topics(internal=internal))

    def topic(self, name: str) -> TopicMetadata:
        """Return a topic with the owners of its partitions. Raises: NotFoundError, InvalidNameError."""
        return self._background.run(self._core.topic(name))

    def ends(self, topics: Sequence[Topic]) -> dict[str, LogAnswers[int, int]]:
        """Return the pointer offsets at which read partitions end, by name of the topic and number.

        A log that fails is in `unknown` of its topic. Raises: NotFoundError; the first error when all logs fail.
        """
        return self._background.run(self._core.ends(topics))

    def end_totals(self, topic: Topic, partitions: Iterable[int] | None = None) -> LogAnswers[int, Totals]:
        """Return how much each read partition of a topic holds, by number, what retention took included.

        With `partitions` only these. A log that fails is in `unknown`.
        Raises: NotFoundError; the first error when all logs fail.
        """
        return self._background.run(self._core.end_totals(topic, partitions))

    def alter_topic(self, name: str, *, settings: Settings) -> Topic:
        """Change settings of a topic and return it.

        Raises: NotFoundError, UnknownSettingError, InvalidSettingError.
        """
        return self._background.run(self._core.alter_topic(name, settings=settings))

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its pointers; its objects go with the sweep. Raises: NotFoundError."""
        self._background.run(self._core.delete_topic(name))

    def groups(self, *, internal: bool = False) -> list[str]:
        """Return the names of all groups, by name; with `internal` memq's own, too."""
        return self._background.run(self._core.groups(internal=internal))

    def group(self, name: str) -> GroupDescription:
        """Return a group: members, positions and lag. Raises: NotFoundError."""
        return self._background.run(self._core.group(name))

    def reset_group(self, group: str, topic: str, to: Point, *, dry_run: bool = False) -> list[Reset]:
        """Put a group that has no members to another place in all partitions of a topic.

        `to` is "beginning", "end", a datetime, or positions as a consumer's `start`; partitions that positions leave
        out stay where they are. With `dry_run` nothing is stored. Raises: NotFoundError, InvalidRequestError.
        """
        return self._background.run(self._core.reset_group(group, topic, to, dry_run=dry_run))

    def delete_group(self, name: str) -> None:
        """Delete a group that has no members, with its positions. Raises: NotFoundError, InvalidRequestError."""
        self._background.run(self._core.delete_group(name))

    def brokers(self) -> list[WireBroker]:
        """Return the live brokers, by id."""
        return self._background.run(self._core.brokers())

    def clients(self, broker: str) -> list[WireClient]:
        """Return what clients may have at one broker: "default", then by name. Raises: NotFoundError."""
        return self._background.run(self._core.clients(broker))

    def load(self, broker: str) -> WireLoad:
        """Return how full one broker is. Raises: NotFoundError."""
        return self._background.run(self._core.load(broker))

    def plan(self) -> GovernorPlan:
        """Return what the governor would change now; nothing is changed."""
        return self._background.run(self._core.plan())

    def drain_broker(self, name: str) -> None:
        """Have a broker hand over what it owns, and return when it has; it owns nothing until it is restarted.

        Raises: NotFoundError, InvalidRequestError when no other broker takes it, TimedOutError.
        """
        self._background.run(self._core.drain_broker(name))

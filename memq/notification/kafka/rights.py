"""Tests every needed right in Kafka at the start; names each missing one and its command."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AclOperation

from memq.errors import DeniedError, NotFoundError, QueueError
from memq.notification.kafka.admin import KafkaAdmin
from memq.notification.kafka.groups.requests import KafkaGroupRequests
from memq.notification.kafka.librdkafka import code_of
from memq.notification.kafka.settings import KafkaSettings
from memq.notification.kafka.topics import READY_PAUSE_S, READY_TRIES, KafkaTopics

CHECK = "_memq-check"  # after the prefix; no conflict with topics of memq, whose names end with an id
# The name of each right for Kafka's command line, and its purpose.
TOPIC_RIGHTS = {
    AclOperation.CREATE: ("Create", "topics are made"),
    AclOperation.DESCRIBE: ("Describe", "ends are looked up"),
    AclOperation.DESCRIBE_CONFIGS: ("DescribeConfigs", "wrong settings are named"),
    AclOperation.ALTER: ("Alter", "topics are widened"),
    AclOperation.ALTER_CONFIGS: ("AlterConfigs", "the bound of age is set"),
    AclOperation.READ: ("Read", "pointers are read"),
    AclOperation.WRITE: ("Write", "pointers are published"),
    AclOperation.DELETE: ("Delete", "retention removes pointers"),
}
# librdkafka looks up the coordinator of each consumer's group, also of those that join none. Without this right, reads
# are denied. Nor does Kafka list groups of an earlier release: they would begin as new ones.
GROUP_RIGHTS = {AclOperation.DESCRIBE: ("Describe", "pointers are read")}
Wanted = dict[AclOperation, tuple[str, str]]


class Rights:
    """Checks this user's rights on topics and groups with the prefix.

    Kafka reports rights only for an existing topic. So `check` creates an empty topic with one partition, and keeps it.
    """

    def __init__(
        self, admin: KafkaAdmin, settings: KafkaSettings, topics: KafkaTopics, requests: KafkaGroupRequests
    ) -> None:
        self._admin = admin
        self._settings = settings
        self._topics = topics
        self._requests = requests
        self._name = settings.prefix + CHECK

    async def check(self) -> None:
        """Prove every right. Raises: DeniedError naming each that is missing; QueueError, InvalidRequestError."""
        missing = [("topic", *right) for right in await self._missing_of_topics()]
        missing += [("group", *right) for right in await self._missing_of_groups()]
        if not missing:
            return
        prefix = self._settings.prefix
        head = f"Kafka at {self._settings.servers}: {len(missing)} rights are missing"
        lines = [f"{right} on {kind}s that begin with '{prefix}', {purpose}" for kind, right, purpose in missing]
        raise DeniedError(f"{head}: {'; '.join(lines)}", hint="; ".join(self._cures({kind for kind, _, _ in missing})))

    async def _missing_of_topics(self) -> Collection[tuple[str, str]]:
        try:
            await self._topics.create_if_absent(self._name)
        except DeniedError as error:
            if code_of(error) != KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise  # a refused login or certificate
            return [TOPIC_RIGHTS[AclOperation.CREATE]]
        return _missing(TOPIC_RIGHTS, await self._operations())

    async def _operations(self) -> Collection[AclOperation]:
        """Return the allowed operations on the topic; wait while Kafka does not know a new one."""
        doing = f"asking for the rights on Kafka topic '{self._name}'"
        for _ in range(READY_TRIES):
            answer = self._admin.describe_topics([self._name], rights=True)[self._name]
            try:
                return (await self._admin.ask(answer, doing)).authorized_operations or ()
            except NotFoundError:
                await asyncio.sleep(READY_PAUSE_S)
            except DeniedError:
                return [operation for operation in TOPIC_RIGHTS if operation is not AclOperation.DESCRIBE]
        raise QueueError(f"{doing}: it was created but does not exist")

    async def _missing_of_groups(self) -> Collection[tuple[str, str]]:
        doing = "asking for the rights on groups"
        for last in range(READY_TRIES, 0, -1):
            try:
                found = await self._requests.describe(self._name, rights=True)
            except KafkaException as error:  # a new Kafka may still be creating its topic of positions
                failure = self._admin.errors.group_failure(error, doing)
                if isinstance(failure, DeniedError):
                    return list(GROUP_RIGHTS.values())
                if last == 1 or not isinstance(failure, QueueError):
                    raise failure from error
                await asyncio.sleep(READY_PAUSE_S)
            else:
                return _missing(GROUP_RIGHTS, found.authorized_operations or ())
        raise AssertionError("the last try raised")

    def _cures(self, kinds: Collection[str]) -> list[str]:
        """Return the commands that grant all rights: without Create, the other rights are unknown."""
        user = self._settings.library.get("sasl.username", "NAME")
        server = self._settings.servers.split(",")[0]
        return [
            f"kafka-acls.sh --bootstrap-server {server} --add --allow-principal User:{user} "
            + " ".join(f"--operation {right}" for right, _ in wanted.values())
            + f" --resource-pattern-type prefixed --{kind} '{self._settings.prefix}'"
            for kind, wanted in (("topic", TOPIC_RIGHTS), ("group", GROUP_RIGHTS))
            if kind in kinds
        ]


def _missing(wanted: Wanted, found: Collection[AclOperation]) -> Collection[tuple[str, str]]:
    return [right for operation, right in wanted.items() if operation not in found]

"""Rights in Kafka: each missing one is named with the command that grants it, and only a denial is one."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AclOperation

from memq.errors import DeniedError, InvalidRequestError, QueueError
from memq.notification.kafka.queue import CHECK_S, KafkaQueue
from memq.notification.kafka.rights import GROUP_RIGHTS, TOPIC_RIGHTS
from memq.notification.kafka.topics import READY_PAUSE_S, READY_TRIES, STALE
from tests.librdkafka import ALL_RIGHTS, Library, Request, use
from tests.skipping_loop import now_s, skip
from tests.unit.kafka_records import over_virtual

CHECKED = "memq._memq-check"
WAIT_S = READY_TRIES * READY_PAUSE_S


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A Kafka without topics."""
    found = Library()
    use(found, monkeypatch)
    return found


def denies(call: str, code: int, *, until_s: float = float("inf"), subject: object = None) -> Request:
    """Return what answers a call with an error until some time of the loop."""
    return lambda called, about: (
        KafkaError(code) if called == call and subject in (None, about) and now_s() < until_s else None
    )


async def missing(queue: KafkaQueue) -> tuple[str, str]:
    with pytest.raises(DeniedError) as caught:
        await queue.check()
    return str(caught.value), caught.value.hint


def test_a_user_with_all_rights_passes_and_proven_rights_are_not_asked_for_again_soon(library: Library) -> None:
    asked: list[float] = []

    def note(call: str, subject: object) -> None:
        if call == "describe_consumer_groups":
            asked.append(now_s())

    library.refuse = note

    async def work(queue: KafkaQueue) -> None:
        await skip(CHECK_S)
        await queue.check()
        assert (len(library.topics[CHECKED]), library.configs[CHECKED][STALE]) == (1, "0")
        await skip(CHECK_S - 1)
        await queue.check()
        assert len(asked) == 1
        await skip(1)
        await queue.check()
        assert len(asked) == 2, "a right may have been taken away"

    over_virtual(work)


@pytest.mark.parametrize("operation", TOPIC_RIGHTS)
def test_a_missing_right_on_topics_is_named_with_its_command(library: Library, operation: AclOperation) -> None:
    library.topic_rights = ALL_RIGHTS - {operation}

    async def work(queue: KafkaQueue) -> None:
        right, purpose = TOPIC_RIGHTS[operation]
        text, hint = await missing(queue)
        assert text == (
            f"Kafka at k1:9092,k2:9092: 1 rights are missing: {right} on topics that begin with 'memq.', {purpose}"
        )
        assert hint.startswith("kafka-acls.sh --bootstrap-server k1:9092 --add --allow-principal User:ann --operation")
        assert all(f"--operation {name}" in hint for name, _ in TOPIC_RIGHTS.values())
        assert hint.endswith("--resource-pattern-type prefixed --topic 'memq.'")
        assert "--group" not in hint

    over_virtual(work, servers="k1,k2", **{"sasl.username": "ann"})


@pytest.mark.parametrize("operation", GROUP_RIGHTS)
def test_a_missing_right_on_groups_is_named_with_its_command(library: Library, operation: AclOperation) -> None:
    library.group_rights = ALL_RIGHTS - {operation}

    async def work(queue: KafkaQueue) -> None:
        right, purpose = GROUP_RIGHTS[operation]
        text, hint = await missing(queue)
        assert text.endswith(f": 1 rights are missing: {right} on groups that begin with 'memq.', {purpose}")
        assert hint.startswith("kafka-acls.sh --bootstrap-server k1:9092 --add --allow-principal User:NAME")
        assert hint.endswith("--group 'memq.'")
        assert "--topic" not in hint

    over_virtual(work, servers="k1,k2")


def test_a_kafka_that_names_no_rights_grants_none(library: Library) -> None:
    library.topic_rights = library.group_rights = None

    async def work(queue: KafkaQueue) -> None:
        text, hint = await missing(queue)
        assert f"{len(TOPIC_RIGHTS) + len(GROUP_RIGHTS)} rights are missing" in text
        assert "--topic" in hint
        assert "--group" in hint

    over_virtual(work)


def test_without_create_no_other_right_is_called_missing(library: Library) -> None:
    """Kafka reports rights of an existing topic only."""
    library.refuse = denies("create_topics", KafkaError.TOPIC_AUTHORIZATION_FAILED)

    async def work(queue: KafkaQueue) -> None:
        text, _ = await missing(queue)
        assert text.endswith(": 1 rights are missing: Create on topics that begin with 'memq.', topics are made")

    over_virtual(work)


def test_a_denial_that_is_not_about_the_topic_is_raised_as_kafka_gives_it(library: Library) -> None:
    library.refuse = denies("create_topics", KafkaError.CLUSTER_AUTHORIZATION_FAILED)

    async def work(queue: KafkaQueue) -> None:
        text, hint = await missing(queue)
        assert text.startswith(f"creating Kafka topic '{CHECKED}'")
        assert "a right on the cluster" in hint

    over_virtual(work)


def test_without_describe_the_other_rights_are_not_called_missing(library: Library) -> None:
    library.refuse = denies("describe_topics", KafkaError.TOPIC_AUTHORIZATION_FAILED)

    async def work(queue: KafkaQueue) -> None:
        text, _ = await missing(queue)
        assert text.endswith(": 1 rights are missing: Describe on topics that begin with 'memq.', ends are looked up")
        assert CHECKED in library.topics

    over_virtual(work)


def test_without_the_rights_of_groups_each_is_named_at_once(library: Library) -> None:
    library.refuse = denies("describe_consumer_groups", KafkaError.GROUP_AUTHORIZATION_FAILED)

    async def work(queue: KafkaQueue) -> None:
        text, _ = await missing(queue)
        assert f": {len(GROUP_RIGHTS)} rights are missing: Describe on groups" in text
        assert now_s() < READY_PAUSE_S

    over_virtual(work)


@pytest.mark.parametrize(
    ("call", "code", "about"),
    [
        ("describe_topics", KafkaError.UNKNOWN_TOPIC_OR_PART, CHECKED),
        ("describe_consumer_groups", KafkaError.COORDINATOR_NOT_AVAILABLE, None),
    ],
)
def test_a_kafka_that_just_started_is_asked_until_it_answers(
    library: Library, call: str, code: int, about: str | None
) -> None:
    """It creates its topic of positions, or does not list the new topic yet."""
    library.refuse = denies(call, code, until_s=WAIT_S / 2, subject=about)

    async def work(queue: KafkaQueue) -> None:
        await queue.check()
        assert WAIT_S / 2 <= now_s() < WAIT_S / 2 + 2 * READY_PAUSE_S
        library.refuse = denies(call, code, subject=about)
        await skip(CHECK_S)
        begin_s = now_s()
        with pytest.raises(QueueError, match="asking for the rights"):
            await queue.check()
        assert now_s() - begin_s == pytest.approx(WAIT_S, abs=1.5 * READY_PAUSE_S)

    over_virtual(work)


def test_each_try_for_the_rights_of_groups_counts(library: Library) -> None:
    asked: list[object] = []

    def refuse(call: str, subject: object) -> KafkaError | None:
        if call != "describe_consumer_groups":
            return None
        asked.append(subject)
        return KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS)

    library.refuse = refuse

    async def work(queue: KafkaQueue) -> None:
        with pytest.raises(QueueError, match="asking for the rights on groups"):
            await queue.check()
        assert asked == [CHECKED] * READY_TRIES

    over_virtual(work)


def test_an_error_that_remains_is_raised_at_once(library: Library) -> None:
    library.refuse = denies("describe_consumer_groups", KafkaError.UNSUPPORTED_VERSION)

    async def work(queue: KafkaQueue) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            await queue.check()
        assert caught.value.hint == "use a newer Kafka"
        assert now_s() < READY_PAUSE_S

    over_virtual(work)


@pytest.mark.parametrize(
    ("call", "code"),
    [("create_topics", KafkaError.UNKNOWN_TOPIC_OR_PART), ("describe_topics", KafkaError._TIMED_OUT)],
)
def test_a_topic_for_the_check_that_kafka_does_not_make_or_describe_may_come_later(
    library: Library, call: str, code: int
) -> None:
    library.refuse = denies(call, code, subject=None if call == "create_topics" else CHECKED)

    async def work(queue: KafkaQueue) -> None:
        with pytest.raises(QueueError, match=f"Kafka topic '{CHECKED}'"):
            await queue.check()
        assert CHECKED not in library.topics
        library.refuse = denies("", 0)
        await queue.check()

    over_virtual(work)

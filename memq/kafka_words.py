"""Hints for users of Kafka: names of its settings and clients, and memq's word for each."""

from __future__ import annotations

_BROKERS = "memq's word is brokers, as HOST:PORT"
_START = "memq's word is start, beginning or end; of memq consume it is -o"
_CODEC = "memq's word is codec: none, zstd or lz4; a producer compresses, and the topic has no setting for it"
_SERIALIZE = "memq takes and returns bytes: encode before send, decode record.key and record.value"
_ONCE = "leave it out: memq always delivers a record once that a producer sends again"
_RETRIES = "leave it out: a producer tries again, in order, until delivery_timeout_ms"
_REPLICAS = "leave it out: memq keeps no replicas; the object store and the queue replicate"
_AGE = "memq's word is retention_ms, for example 7d; 0 keeps all records"
_COMPACTION = "memq removes records by age and size: retention_ms and retention_bytes; it never compacts by key"
_FETCH = "memq's word is prefetch_bytes_max"
_RECORD = "memq's word is record_bytes_max, a setting of the topic"
_BEATS = "leave it out: a consumer sends heartbeats by itself; session_timeout_ms is the silence after which it is out"
_OPTIONS = "each setting has an option of its own; a file of settings is --config FILE"
_TOPIC = "the topic needs no option: write its name after the command, as in memq produce TOPIC"

# In lower case, with `_` for `.` and `-`.
KAFKA_WORDS: dict[str, str] = {
    # clients
    "bootstrap_server": _BROKERS,
    "bootstrap_servers": _BROKERS,
    "broker_list": _BROKERS,
    "metadata_broker_list": _BROKERS,
    "group_id": "memq's word is group",
    "client_rack": "memq's word is zone",
    "rack_id": "memq's word is zone",
    "connections_max_idle_ms": "leave it out: memq keeps its connections",
    "request_timeout_ms": "memq's words are connect_timeout_ms, and for producers delivery_timeout_ms",
    "socket_timeout_ms": "memq's words are connect_timeout_ms, and for producers delivery_timeout_ms",
    # producers
    "ack": "memq's word is acks: 0, 1 or all",
    "request_required_acks": "memq's word is acks: 0, 1 or all",
    "batch_num_messages": "memq's word is block_bytes",
    "batch_size": "memq's word is block_bytes",
    "buffer_memory": "memq's word is pending_bytes_max",
    "compression": _CODEC,
    "compression_codec": _CODEC,
    "compression_type": _CODEC,
    "enable_idempotence": _ONCE,
    "key_serializer": _SERIALIZE,
    "linger": "memq's word is linger_ms",
    "max_block_ms": "memq's word is when_full: seconds to wait, 'block' or 'raise'",
    "max_in_flight": _RETRIES,
    "max_in_flight_requests_per_connection": _RETRIES,
    "message_timeout_ms": "memq's word is delivery_timeout_ms",
    "on_delivery": "memq's word is on_ack, an argument of Producer; it gets the Ack or the error of each block",
    "partitioner": "give each record a key, or send it with partition=",
    "queue_buffering_max_kbytes": "memq's word is pending_bytes_max",
    "queue_buffering_max_ms": "memq's word is linger_ms",
    "retries": _RETRIES,
    "transactional_id": "memq's word is transactional_id, an argument of Producer; see docs/transactions.md",
    "value_serializer": _SERIALIZE,
    # consumers
    "auto_offset_reset": _START,
    "consumer_timeout_ms": "memq's word is timeout, in seconds, of poll; with end='end' the iteration ends",
    "enable_auto_commit": "memq's word is auto_commit",
    "fetch_max_bytes": _FETCH,
    "fetch_min_bytes": _FETCH,
    "fetch_max_wait_ms": "leave it out: a consumer learns of each batch at once",
    "from_beginning": "leave it out: memq consume begins there, and -o beginning says it; of a consumer it is start",
    "heartbeat_interval_ms": _BEATS,
    "isolation_level": "leave it out: consumers see stored batches only, each whole",
    "key_deserializer": _SERIALIZE,
    "max_partition_fetch_bytes": _FETCH,
    "max_poll_interval_ms": _BEATS,
    "max_poll_records": _FETCH,
    "queued_max_messages_kbytes": _FETCH,
    "value_deserializer": _SERIALIZE,
    # topics
    "cleanup_policy": _COMPACTION,
    "config": "memq's word is settings; of memq topic it is --set KEY=VALUE",
    "configs": "memq's word is settings; of memq topic it is --set KEY=VALUE",
    "delete_retention_ms": _COMPACTION,
    "if_not_exists": "memq's word is exist_ok",
    "max_message_bytes": _RECORD,
    "max_request_size": _RECORD,
    "message_max_bytes": _RECORD,
    "min_cleanable_dirty_ratio": _COMPACTION,
    "min_insync_replicas": _REPLICAS,
    "num_partitions": "memq's word is partitions",
    "partitions": "a topic gets them at its creation; --set write_partitions_max=N lets the governor add some",
    "replica_assignment": _REPLICAS,
    "replication": _REPLICAS,
    "replication_factor": _REPLICAS,
    "retention": _AGE,
    "retention_hours": _AGE,
    "retention_minutes": _AGE,
    "segment_bytes": "memq's word is batch_bytes_max",
    "segment_ms": "memq's word is batch_age_ms_max",
    "topic_config": "memq's word is settings; of memq topic it is --set KEY=VALUE",
    "topic_configs": "memq's word is settings; of memq topic it is --set KEY=VALUE",
    "t": _TOPIC,
    "topic": _TOPIC,
    # tools
    "consumer_property": _OPTIONS,
    "max_messages": "the number of records is -c of memq consume",
    "producer_property": _OPTIONS,
    "property": _OPTIONS,
    "reset_offsets": "that is a command: memq group reset",
    "shift_by": "memq's word is --shift",
    "to_offset": "memq's word is --to, with a position as 0:17:3",
    "to_current": "leave it out: a group keeps its positions",
    "j": "memq's word is --json",
    "q": "leave it out: stdout has records only; 2>/dev/null drops the messages",
    "quiet": "leave it out: stdout has records only; 2>/dev/null drops the messages",
    # brokers
    "advertised_listeners": "memq's word is advertise, as HOST:PORT",
    "auto_create_topics_enable": "memq's word is auto_create_topics",
    "broker_rack": "memq's word is zone",
    "default_replication_factor": _REPLICAS,
    "listeners": "memq's words are host and port",
    "log_dir": "memq's word is data for memq dev, and store for a broker of a cluster",
    "log_dirs": "memq's word is data for memq dev, and store for a broker of a cluster",
    "log_retention_bytes": "memq's word is retention_bytes, a setting of the topic",
    "log_retention_hours": _AGE,
    "log_retention_ms": _AGE,
    "zookeeper": "memq's word is coordinator, as zookeeper://HOST:PORT/PATH",
    "zookeeper_connect": "memq's word is coordinator, as zookeeper://HOST:PORT/PATH",
}
_START_AT = "memq's word is start of the consumer, as {(topic, partition): Position}"
_BATCHES = "memq's word is poll; iterate its batch for the records"
_ENDS = "memq's words are Admin.ends and Consumer.lag"

# Methods of the consumers and admins of Kafka's Python clients.
KAFKA_METHODS: dict[str, str] = {
    # consumers
    "assign": _START_AT,
    "assignment": "memq's word is position; on_assigned and on_revoked report changes",
    "beginning_offsets": _ENDS,
    "commit_async": "memq's word is commit; with auto_commit it needs no call",
    "consume": _BATCHES,
    "end_offsets": _ENDS,
    "get_watermark_offsets": _ENDS,
    "getmany": _BATCHES,
    "getone": _BATCHES,
    "offsets_for_times": "memq's word is start or seek, with a datetime",
    "seek_to_beginning": "memq's word is seek: seek(topic, partition, 'beginning')",
    "seek_to_end": "memq's word is seek: seek(topic, partition, 'end')",
    "subscribe": "memq's word is topics, the second argument of the consumer",
    "subscription": "memq's word is topics, the second argument of the consumer",
    "unsubscribe": "memq's word is close; a consumer keeps its topics",
    # admins
    "alter_configs": "memq's word is alter_topic",
    "create_partitions": "memq's word is alter_topic, with the setting write_partitions_max",
    "create_topics": "memq's word is create_topic, for one topic",
    "delete_consumer_groups": "memq's word is delete_group, for one group",
    "delete_topics": "memq's word is delete_topic, for one topic",
    "describe_configs": "memq's word is topic: topic(name).topic.settings",
    "describe_consumer_groups": "memq's word is group, for one group",
    "describe_topics": "memq's word is topic, for one topic",
    "list_consumer_groups": "memq's word is groups",
    "list_topics": "memq's word is topics",
}
KAFKA_ALL = "the -1 of Kafka is all"

# The modes of kcat, which are commands here.
KCAT_MODES = {
    "-C": "memq consume TOPIC",
    "-G": "memq consume TOPIC -G GROUP",
    "-L": "memq topic list",
    "-P": "memq produce TOPIC",
    "-Q": "memq consume TOPIC -o @TIME -c 1",
}


def kafka_hint(name: str) -> str:
    """Return what to use in memq in place of a name from Kafka; "" for other names."""
    return KAFKA_WORDS.get(name.strip("-").lower().replace(".", "_").replace("-", "_"), "")

"""The table of commands, and the text of `memq --help`, without imports."""

from __future__ import annotations

INTERRUPTED = 130  # exit code that a shell reports for a program that SIGINT ended
PIPE_CLOSED = 141  # exit code that a shell reports for a program that SIGPIPE ended
COMPLETE_VARIABLE = "_MEMQ_COMPLETE"  # set by the shell when it asks for completions

# name: (module, attribute, summary); in the order of help
COMMANDS: dict[str, tuple[str, str, str]] = {
    "dev": ("memq.cli.cluster.dev", "dev", "run broker, store, queue and auditor in one process, on one folder"),
    "broker": ("memq.cli.cluster.broker", "broker", "run one broker of a cluster; list and drain brokers"),
    "governor": ("memq.cli.cluster.broker", "governor", "show the moves that the governor plans"),
    "topic": (
        "memq.cli.cluster.topic",
        "topic",
        "create, change, truncate, seal and delete topics; list them and count records",
    ),
    "produce": ("memq.cli.records.produce", "produce", "send records, one per line of stdin or files"),
    "consume": ("memq.cli.records.consume", "consume", "print records"),
    "listen": ("memq.cli.records.listen", "listen", "run a program for each record, with retries and dead letters"),
    "dlq": ("memq.cli.records.dlq", "dlq", "list, show, redrive and purge dead letters"),
    "queue": (
        "memq.cli.records.queue",
        "queue",
        "list, describe and audit queues of items; enqueue, dequeue and cancel items",
    ),
    "worker": ("memq.cli.records.worker", "worker", "run a program for each item of queues"),
    "get": ("memq.cli.records.get", "get", "print one record, by its position"),
    "group": ("memq.cli.cluster.group", "group", "list, describe, reset, delete and migrate consumer groups"),
    "lag": ("memq.cli.cluster.group", "lag", "show the lag of consumer groups, in records and bytes"),
    "top": ("memq.cli.top", "top", "watch topics, brokers and the lag of groups"),
    "transaction": (
        "memq.cli.cluster.transaction",
        "transaction",
        "list undecided transactions; commit one, or roll it back",
    ),
    "inspect": ("memq.cli.store.inspect", "inspect", "show the contents of an object"),
    "verify": ("memq.cli.store.verify", "verify", "check objects, folders or topics: index, blocks, checksums"),
    "audit": ("memq.cli.store.audit", "audit", "report lost, doubled and damaged records of a topic"),
    "trace": ("memq.cli.store.trace", "trace", "show the path of one record"),
    "auditor": ("memq.cli.cluster.auditor", "auditor", "watch all topics for lost, doubled and damaged records"),
    "import": ("memq.cli.records.import_topics", "import_topics", "copy topics from a Kafka cluster"),
    "compact": ("memq.cli.store.compact", "compact_topic", "copy old batches into large objects"),
    "sweep": ("memq.cli.store.sweep", "sweep", "delete objects that no pointer names, or list them"),
    "restore": ("memq.cli.store.restore", "restore", "rebuild a lost notification queue from the objects"),
    "accept-store": ("memq.cli.store.restore", "accept_store", "accept a moved store for the cluster"),
    "bench": ("memq.cli.records.bench", "bench", "measure produce and consume against a broker"),
    "acl": ("memq.cli.cluster.acl", "acl", "list, change and test the permissions of principals"),
    "apply": (
        "memq.cli.declared.apply",
        "apply",
        "make a cluster agree with a file of topics, groups, permissions and quotas",
    ),
    "namespace": (
        "memq.cli.cluster.namespace",
        "namespace",
        "list and change namespaces: defaults and limits",
    ),
    "quota": ("memq.cli.cluster.quota", "quota", "list and change the quotas of principals and namespaces"),
    "users": ("memq.cli.cluster.users", "users", "add, remove and list users that log in with a password"),
    "iam": ("memq.cli.store.iam", "iam", "print the policy that a role needs on the bucket"),
    "keys": ("memq.cli.cluster.keys", "keys", "make, rotate and list the keys of encrypted records"),
    "forget": ("memq.cli.cluster.keys", "forget", "destroy the key of a subject, so that its records are unreadable"),
    "certs": ("memq.cli.cluster.certs", "certs", "make and show the certificates of brokers and clients"),
    "doctor": ("memq.cli.cluster.doctor", "doctor", "check this machine, the settings and the broker"),
    "config": ("memq.cli.cluster.doctor", "config", "show the settings and their origins"),
    "completion": ("memq.cli.completion", "completion", "print the completion script of bash, zsh or fish"),
}


def help_text() -> str:
    """Return the text of `memq --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, _, text) in COMMANDS.items()]
    return "\n".join(
        (
            "Usage: memq COMMAND [OPTIONS] [ARGUMENTS]",
            "",
            "memq: a pub/sub log whose storage is an object store.",
            "",
            "Commands:",
            *lines,
            "",
            "'memq help COMMAND' and 'memq COMMAND --help' show the options of a command, 'memq -V' the version.",
        )
    )

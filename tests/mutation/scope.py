"""Which files of the product are mutated, and under which name the report counts them."""

from __future__ import annotations

from tests.mutation.mutant import ROOT

# part -> the files that begin with one of these, counted with the first part that fits
PARTS: dict[str, tuple[str, ...]] = {
    "state log": ("memq/state_log/",),
    "holds": ("memq/holds/", "memq/broker/holds/"),
    "transactions": ("memq/transactions/", "memq/client/transactions/"),
    "queues": (
        "memq/queues/",
        "memq/client/queue/",
        "memq/broker/api/queue_requests.py",
        "memq/broker/api/pop_requests.py",
    ),
    "permissions": (
        "memq/permissions.py",
        "memq/broker/permissions/",
        "memq/broker/identity/",
        "memq/scram.py",
        "memq/client/permission_admin.py",
    ),
    "quotas": (
        "memq/quotas.py",
        "memq/broker/ingest/quota",
        "memq/governor/quota_shares.py",
        "memq/broker/upkeep/share_rounds.py",
    ),
    "spool": ("memq/broker/spool/",),
    "groups": (
        "memq/groups/",
        "memq/notification/sqlite/group_commit.py",
        "memq/notification/sqlite/former_groups.py",
        "memq/notification/kafka/groups/",
        "memq/notification/kafka/request_coalescer.py",
        "memq/broker/api/group_requests.py",
        "memq/client/consumer/group_",
        "memq/client/consumer/progress.py",
    ),
    "direct writes": (
        "memq/client/bulk/direct_writer.py",
        "memq/client/bulk/staged_",
        "memq/spark/write.py",
    ),
    "Spark readers": (
        "memq/spark/access.py",
        "memq/spark/options.py",
        "memq/spark/read/",
        "memq/spark/source.py",
        "memq/spark/stores.py",
        "memq/spark/stream_offsets.py",
        "memq/spark/stream_reader.py",
    ),
    "broker": ("memq/broker/", "memq/kernel/blocks", "memq/kernel/header_table.py"),
    "client": ("memq/client/", "memq/protocol/link.py", "memq/format/batch.py"),
    "kafka": ("memq/notification/kafka/",),
    "notification": ("memq/notification/", "memq/runtime/sqlite_file.py"),
    "storage handlers": ("memq/storage_handlers/",),
    "compaction": ("memq/compaction/",),
    "governor": ("memq/governor/",),
}


# Most of what these do is shown on real servers only, by tests that take too long for mutants: they are left out of the
# sample of `make check`.
ON_SERVERS = (
    "memq/governor/zookeeper/",
    "memq/notification/kafka/groups/",
    "memq/storage_handlers/s3/",
    "memq/spark/write.py",
)


def part_of(path: str) -> str:
    """Return the part that a file is counted with, "" when it is not mutated."""
    return next((part for part, starts in PARTS.items() if path.startswith(starts)), "")


def files_of(module: str) -> list[str]:
    """Return the files to mutate: all, those of a part by its name, or those whose path begins with `module`."""
    paths = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "memq").rglob("*.py"))
    return [path for path in paths if part_of(path) and (module == part_of(path) or path.startswith(module))]


def fast_files(module: str = "memq/") -> list[str]:
    """Return those of them that fast tests show."""
    return [path for path in files_of(module) if not path.startswith(ON_SERVERS)]

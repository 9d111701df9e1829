"""The live audit when its topic `_memq_audit` is missing, or was deleted and made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from memq.audit.live.service import live_audit
from memq.audit.live.storage.database import SqliteDatabase
from memq.errors import NotFoundError
from memq.format.report import AUDIT_TOPIC
from memq.runtime.runtime import Runtime
from tests.brokers import run, running_broker

KEEP_MS = 86_400_000


@pytest.mark.parametrize("audits", [True, False])
def test_an_auditor_without_its_topic_says_whether_the_cluster_audits(tmp_path: Path, audits: bool) -> None:
    async def work() -> None:
        database = SqliteDatabase(tmp_path / "audit.sqlite")
        async with running_broker(audit=audits) as broker:
            if audits:
                await broker.partitions.delete(broker.partitions.topic(AUDIT_TOPIC))
            with pytest.raises(NotFoundError) as missing:
                async with live_audit(broker.address, database, KEEP_MS, Runtime()):
                    pass
        await database.close()
        assert ("the cluster does not audit" in str(missing.value)) == (not audits)
        assert ("was deleted" in str(missing.value)) == audits

    run(work())

"""The audit demo on a part of its records: a loss, a doubling and a damaged block, each named, and no other."""

from __future__ import annotations

from pathlib import Path

from tests.demos import run_demo
from tests.servers import dev_server

TIMEOUT_S = 400


def test_the_audit_demo_names_each_injury(tmp_path: Path) -> None:
    printed = run_demo("audit_demo", tmp_path, 30_000, TIMEOUT_S)
    assert "is ok" in printed
    for kind in ("lost", "doubled", "corrupt"):
        assert f" {kind}" in printed.split("named by the auditor")[1]
    data = tmp_path / "memq-audit-demo"
    objects = sorted(path for path in (data / "objects").rglob("*") if path.is_file())
    with dev_server(data, "--sweep-confirm-ms", "1s", "--sweep-age-ms", "1s") as server:
        for _ in range(2):  # each start is a pass of the sweep, and this one follows on the first by more than a second
            server.stop()
            server.start()
        assert all(path.exists() for path in objects), "a start destroys the evidence"
        assert "not-swept" in server.log.read_text()

"""Every command and every program of the tutorial runs, and prints what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.servers import DevServer, dev_server

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"\d{13}|\d+:\d+:\d+")  # times and positions
LIMIT_S = 60


def steps() -> list[tuple[str, str, str]]:
    """Return (language, code, output that the page shows) of each block; the first one installs and starts."""
    blocks = [(found[1], found[2]) for found in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]
    found = []
    for index, (language, code) in enumerate(blocks):
        shown = blocks[index + 1][1] if index + 1 < len(blocks) and blocks[index + 1][0] == "text" else ""
        if language != "text":
            found.append((language, code, shown))
    return found[1:]


def run(language: str, code: str, folder: Path, server: DevServer) -> str:
    """Run a block as a reader would paste it, and return its output."""
    memq = folder / "bin" / "memq"
    if not memq.exists():
        memq.parent.mkdir()
        memq.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m memq "$@"\n', encoding="utf-8")
        memq.chmod(0o755)
    code = code.replace("127.0.0.1:9876", server.address).replace("memq-data", str(server.data))
    command = ["/bin/sh", "-euc", code] if language == "sh" else [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "PATH": f"{memq.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "MEMQ_BROKERS": server.address,
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{code}{done.stdout}{done.stderr}"
    return done.stdout


def plain(text: str) -> list[str]:
    """Return the lines with one space between words, and without times and positions."""
    return [re.sub(r"\s+", " ", VARIABLE.sub("…", line)).strip() for line in text.strip().splitlines()]


def test_each_step_prints_what_the_page_shows(tmp_path: Path) -> None:
    with dev_server(tmp_path / "memq-data") as server:
        printed = ""
        for language, code, shown in steps():
            printed = run(language, code, tmp_path, server)
            assert plain(printed)[: len(plain(shown))] == plain(shown), code
        assert "memq-data" in printed  # `memq inspect` of the last step lists the objects
        assert sorted((tmp_path / "sent.txt").read_text(encoding="utf-8").split("\n"))[-2:] == ["to: ann", "to: bob"]

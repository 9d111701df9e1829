"""Every command and every program of the tutorial runs, and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

from tests.pages import ROOT, run_block
from tests.servers import DevServer, dev_server

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
    """Run a block against the server of the test, and return its output."""
    code = code.replace("127.0.0.1:9876", server.address).replace("memq-data", str(server.data))
    return run_block(code, folder, {"MEMQ_BROKERS": server.address}, LIMIT_S, language=language)


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

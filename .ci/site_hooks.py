"""Hooks of `make docs`: links to files that are not on the site become plain text."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page without its links to files of the repository that are not in `docs/`."""
    folder = PurePosixPath(page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        depth = len(folder.parts)
        for part in PurePosixPath(link[2]).parts:
            depth += -1 if part == ".." else 1
            if depth < 0:
                return link[1]
        return link[0]

    return LINK.sub(replaced, markdown)

"""Seeds that no run has used: drawn from the commit, so one commit always has the same ones."""

from __future__ import annotations

import hashlib
import random
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from tests.soak import SOAKING

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
FIRST = 1_000_000  # below it lie the seeds of named tests and of planted bugs
SPAN = 10**12


def fresh_start(root: Path = ROOT) -> int:
    """Return the first fresh seed of the commit in `root`; outside of git, of its sources."""
    return FIRST + int(hashlib.sha256(_version(root).encode()).hexdigest(), 16) % SPAN


def some_of(items: Iterable[T], part: int) -> list[T]:
    """Return one of `part` parts of the items, drawn from the commit, in order; all of them in a soak."""
    known = list(items)
    if SOAKING:
        return known
    chosen = random.Random(fresh_start()).sample(range(len(known)), -(-len(known) // part))
    return [known[at] for at in sorted(chosen)]


def _version(root: Path) -> str:
    """Return the commit's hash; in a tree without git (a release's tarball) a hash of the sources."""
    if (root / ".git").exists():
        asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
        ran = subprocess.run(asked, capture_output=True, text=True, check=False)
        if ran.returncode == 0:
            return ran.stdout.strip()
    sources = hashlib.sha256()
    for path in sorted([*root.glob("memq/**/*.py"), *root.glob("tests/simulation/*.py")]):
        sources.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return sources.hexdigest()

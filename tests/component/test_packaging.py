"""The wheel has exactly what users import; the constraints name a version of each library."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"


def requirements() -> list[Requirement]:
    """Return the libraries of memq and of all its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return [found for found in map(Requirement, lines) if found.name not in ("memq", "memq-native")]


def test_each_library_has_a_version_that_memq_takes() -> None:
    pinned = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#"))
    versions = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pinned.items()}
    for wanted in requirements():
        version = versions[re.sub(r"[-_.]+", "-", wanted.name).lower()]
        assert wanted.specifier.contains(version, prereleases=True), f"{wanted} has {version} in {CONSTRAINTS.name}"


@pytest.mark.thorough
def test_the_wheel_has_the_packages_and_no_tests(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    built = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(tree)]
    subprocess.run(built, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"memq", "memq_localstack", "pyspark_memq"}
    packaged = {name for name in names if name.endswith(".py")}
    roots = [ROOT / top for top in ("memq", "memq_localstack", "pyspark_memq")]
    assert packaged == {path.relative_to(ROOT).as_posix() for root in roots for path in root.rglob("*.py")}
    assert {"memq/py.typed", "memq_localstack/jars.txt"} <= set(names)
    assert wheel.name.endswith("-py3-none-any.whl")  # nothing in it is compiled
    assert any(name.startswith("memq/audit/dashboard/assets/") for name in names)

"""Bandit over the packages, and pip-audit over the pinned libraries: `make supply-chain`.

Bandit must find nothing but the places below, each with its reason. pip-audit needs its service: without it, this
says so, and the exit code does not change.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CODE = ("memq", "pyspark_memq", "memq_localstack")
LIMIT_S = 120
RULES = {  # that are not for this code
    "B101": "assertions are of states that cannot be; input from outside is never an assert",
    "B311": "random numbers of the simulation are seeded, those of products come from the system",
    "B403": "the import of pickle; B301 finds its uses",
    "B404": "the import of subprocess; B602 and B605 find shells",
    "B603": "processes are started with a list of arguments, without a shell",
}
PLACES = {
    ("B104", "memq/broker/assembly.py"): "compares the host with 0.0.0.0, to refuse it without TLS",
    ("B104", "memq/broker/upkeep/own_groups.py"): "compares the host with 0.0.0.0, to connect to loopback",
    ("B104", "memq/simulation/world/network.py"): "compares the host with 0.0.0.0, in virtual time",
    ("B105", "memq/celery/transport.py"): "the name of an option",
    ("B105", "memq/cli/options.py"): "the name of an option",
    ("B108", "memq_localstack/s3.py"): "a server for tests",
    ("B301", "memq/spark/pipelines/audit.py"): "bytes of the same job, between its own tasks",
    ("B301", "memq/spark/pipelines/topic_profile.py"): "bytes of the same job, between its own tasks",
    ("B323", "memq_localstack/servers.py"): "a check that a server for tests on loopback answers",
}


def main() -> int:
    """Run both; the exit code is 0 when bandit is clean and no pinned library has a known vulnerability."""
    tools = Path(sys.executable).parent
    clean = check_code(tools / "bandit")
    sound = check_libraries(tools / "pip-audit")
    return 0 if clean and sound else 1


def check_code(bandit: Path) -> bool:
    """Print the findings of bandit that no reason covers, and reasons without a finding."""
    line = [str(bandit), "-q", "-r", *CODE, "-s", ",".join(RULES), "-f", "json"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    report = json.loads(done.stdout)
    found = {(each["test_id"], each["filename"].removeprefix("./")): each for each in report["results"]}
    for (rule, file), each in found.items():
        if (rule, file) not in PLACES:
            print(f"bandit: {file}:{each['line_number']}: {rule}: {each['issue_text']}")
    for rule, file in PLACES.keys() - found.keys():
        print(f"bandit: {file}: {rule} is not found any more: remove its reason")
    for each in report["errors"]:
        print(f"bandit: {each['filename']}: {each['reason']}")
    print(f"bandit: {report['metrics']['_totals']['loc']} lines, {len(found)} places with a reason")
    return not report["errors"] and found.keys() == PLACES.keys()


def check_libraries(pip_audit: Path) -> bool:
    """Print the known vulnerabilities of the pinned libraries."""
    line = [str(pip_audit), "-r", "constraints.txt", "--no-deps", "--disable-pip", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            [*line, "-f", "json"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        libraries: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError) as error:
        print(f"pip-audit: the service was not reached ({type(error).__name__}); no library was checked")
        return True
    skipped = [each["name"] for each in libraries if "skip_reason" in each]
    bad = [each for each in libraries if each.get("vulns")]
    for each in bad:
        names = ", ".join(one["id"] for one in each["vulns"])
        print(f"pip-audit: {each['name']} {each['version']}: {names}")
    checked = len(libraries) - len(skipped)
    if not checked:
        print(f"pip-audit: the service was not reached, or knows none of {len(skipped)} libraries; none was checked")
    else:
        print(f"pip-audit: {checked} libraries checked, {len(skipped)} unknown to the service")
    return not bad


if __name__ == "__main__":
    sys.exit(main())

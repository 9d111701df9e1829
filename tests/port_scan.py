"""A scan of all ports with TLS by sslyze: `make port-scan`.

It starts `memq dev` and `memq auditor` with certificates of `memq certs`, and scans the data port, the HTTP port and
both dashboards. Each port must have TLS 1.3 alone, and no weakness that sslyze knows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from memq_localstack.ports import HOST, free_ports
from tests.auditors import AuditorProcess
from tests.certificates import Certificates
from tests.servers import dev_server

LIMIT_S = 300
TOKEN = "a-token-of-the-scan"
VERSION_SCANS = ("sslv2", "sslv3", "tlsv1", "tlsv1_1", "tlsv1_2", "tlsv1_3")
VERSIONS = ("ssl_2_0", "ssl_3_0", "tls_1_0", "tls_1_1", "tls_1_2", "tls_1_3")
SCANS = ("certinfo", "compression", "reneg", "heartbleed", "openssl_ccs", "robot", "early_data", "elliptic_curves")
STRONG = {"X25519", "X448", "secp256r1", "secp384r1", "secp521r1"}
# A field of a result, and its value without the weakness.
SOUND: dict[str, dict[str, object]] = {
    "heartbleed": {"is_vulnerable_to_heartbleed": False},
    "openssl_ccs_injection": {"is_vulnerable_to_ccs_injection": False},
    "robot": {"robot_result": "NOT_VULNERABLE_RSA_NOT_SUPPORTED"},
    "session_renegotiation": {"is_vulnerable_to_client_renegotiation_dos": False},
    "tls_1_3_early_data": {"supports_early_data": False},
    "tls_compression": {"supports_compression": False},
}


class ScannedAuditor(AuditorProcess):
    """An auditor with a dashboard that speaks TLS."""

    def __init__(self, folder: Path, brokers: str, dashboard: list[str], trusted: str) -> None:
        super().__init__(folder, "auditor", brokers, f"sqlite:{folder}/audit.sqlite")
        self._dashboard, self._trusted = dashboard, trusted

    def command(self) -> list[str]:
        """Return what Python is given to start it."""
        return [*super().command()[:-2], *self._dashboard]

    def environment(self) -> dict[str, str]:
        """Return its environment."""
        return {**os.environ, "MEMQ_TLS_CA_FILE": self._trusted}


def main() -> int:
    """Scan all ports and print a table; the exit code is 0 without a finding."""
    sslyze = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as ports:
        findings = 0
        for name, address in ports.items():
            report = scan(sslyze, address, Path(folder) / "report.json")
            row, found = judged(report)
            print(f"| {name} | {' | '.join(row)} | {'; '.join(found) or 'none'} |")
            findings += len(found)
    print(f"port-scan: {len(ports)} ports, {findings} findings")
    return int(findings > 0)


@contextmanager
def serving(folder: Path) -> Iterator[dict[str, str]]:
    """Run the servers; return their addresses by name."""
    certificates = Certificates(folder / "certs")
    mine = certificates.issue("broker-1", HOST)
    chain = folder / "chain.pem"
    chain.write_text(Path(mine.cert_file).read_text() + Path(certificates.trusted.ca_file).read_text())
    token = folder / "token"
    token.write_text(TOKEN)
    config = folder / "memq.toml"
    config.write_text(
        f'[tls]\ncert_file = "{chain}"\nkey_file = "{mine.key_file}"\nca_file = "{mine.ca_file}"\n'
        'clients = "optional"\n'
    )
    http, own, auditor = free_ports(3)

    def dashboard(port: int) -> list[str]:
        files = ["--dashboard-tls-cert", str(chain), "--dashboard-tls-key", mine.key_file]
        return ["--dashboard-port", str(port), *files, "--dashboard-token-file", str(token)]

    with ExitStack() as stack:
        options = ["--config", str(config), "--http-port", str(http), *dashboard(own)]
        server = stack.enter_context(dev_server(folder / "data", *options))
        process = ScannedAuditor(folder, server.address, dashboard(auditor), mine.ca_file)
        stack.callback(process.close)
        process.start()
        yield {
            "data port": server.address,
            "HTTP port": f"{HOST}:{http}",
            "dashboard": f"{HOST}:{own}",
            "dashboard of the auditor": f"{HOST}:{auditor}",
        }


def scan(sslyze: str, address: str, file: Path) -> dict[str, Any]:
    """Return what sslyze finds at an address."""
    scans = [f"--{name}" for name in (*VERSION_SCANS, *SCANS)]
    line = [sslyze, f"--json_out={file}", "--mozilla_config=disable", *scans, address]
    subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    (server,) = json.loads(file.read_text())["server_scan_results"]
    assert server["scan_status"] == "COMPLETED", server
    found: dict[str, Any] = server["scan_result"]
    return found


def judged(report: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return versions, cipher suites and curves of a port, and its findings."""
    suites = {name: suites_of(report, name) for name in VERSIONS}
    found = [f"{name} is accepted" for name in VERSIONS[:-1] if suites[name]]
    found += [] if suites["tls_1_3"] else ["tls_1_3 is not accepted"]
    curves = [each["name"] for each in result_of(report, "elliptic_curves")["supported_curves"] or ()]
    found += [f"curve {name}" for name in curves if name not in STRONG]
    for part, sound in SOUND.items():
        result = result_of(report, part)
        found += [f"{part}: {field} is {result[field]}" for field, value in sound.items() if result[field] != value]
    for deployed in result_of(report, "certificate_info")["certificate_deployments"]:
        if not deployed["received_chain_has_valid_order"] or deployed["verified_chain_has_sha1_signature"]:
            found.append("certificate chain")
    accepted = [name for name in VERSIONS if suites[name]]
    return [", ".join(accepted), ", ".join(suites["tls_1_3"]), ", ".join(curves)], found


def suites_of(report: dict[str, Any], version: str) -> list[str]:
    """Return the cipher suites that a port accepts with a version of TLS."""
    accepted = result_of(report, f"{version}_cipher_suites")["accepted_cipher_suites"]
    return [each["cipher_suite"]["name"] for each in accepted]


def result_of(report: dict[str, Any], part: str) -> dict[str, Any]:
    """Return the result of one kind of scan, which must be complete."""
    assert report[part]["status"] == "COMPLETED", (part, report[part])
    found: dict[str, Any] = report[part]["result"]
    return found


if __name__ == "__main__":
    sys.exit(main())

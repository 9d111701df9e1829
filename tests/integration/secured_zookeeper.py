"""A real ZooKeeper that speaks TLS alone, and asks each client for a certificate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memq.runtime.tls import Tls
from memq_localstack.ports import HOST
from memq_localstack.servers import Server, start_zookeeper
from tests.certificates import Certificates
from tests.integration.secured_kafka import key_store

USER, PASSWORD = "memq", "not a secret either"
_LOGINS = "DigestAuthenticationProvider.enabled"


@dataclass(frozen=True)
class SecuredZookeeper:
    """The server. Its certificate names 127.0.0.1, and nothing else."""

    server: Server

    def section(self, tls: Tls, password: str = PASSWORD) -> dict[str, str | bool]:
        """Return the lines of `[zookeeper]` for a client with these certificates."""
        return {
            "tls": True,
            "tls_ca_file": tls.ca_file,
            "tls_cert_file": tls.cert_file,
            "tls_key_file": tls.key_file,
            "auth": f"digest:{USER}:{password}",
            "acl": "creator",
        }

    def restart(self, *, logins: bool) -> None:
        """Start it again; without logins it refuses every password."""
        config = self.server.folder / "zoo.cfg"
        kept = [line for line in config.read_text().splitlines() if not line.startswith(_LOGINS)]
        config.write_text("\n".join([*kept, f"{_LOGINS}={str(logins).lower()}"]))
        self.server.restart()

    @property
    def refused(self) -> int:
        """How many clients it has refused for want of logins."""
        return self.server.log.read_text().count("No authentication provider for scheme: digest")


@contextmanager
def secured_zookeeper(folder: Path, certificates: Certificates) -> Iterator[SecuredZookeeper]:
    """Run a ZooKeeper with a certificate of this authority."""
    server = start_zookeeper(folder, settings=_settings(certificates))
    try:
        yield SecuredZookeeper(server)
    finally:
        server.stop()


def _settings(certificates: Certificates) -> dict[str, str]:
    return {
        "clientPort": "",
        "clientPortAddress": "",
        "secureClientPort": "{port}",
        "secureClientPortAddress": HOST,
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "ssl.keyStore.type": "PEM",
        "ssl.keyStore.location": str(key_store(certificates, "zookeeper", HOST)),
        "ssl.trustStore.type": "PEM",
        "ssl.trustStore.location": certificates.trusted.ca_file,
        "ssl.clientAuth": "need",
        "ssl.protocol": "TLSv1.3",
        "ssl.enabledProtocols": "TLSv1.3",
    }

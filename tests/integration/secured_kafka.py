"""A real Kafka with mutual TLS by certificates of `memq certs`, logins and ACLs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from memq.runtime.tls import Tls
from memq_localstack.ports import HOST
from memq_localstack.servers import Server
from tests.certificates import Certificates
from tests.integration.kafka import running_kafka

ADMIN, PASSWORD = "admin", "not a secret"  # every user has this password
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule"


@dataclass(frozen=True)
class Secured:
    """The server, the authority of all certificates, and that of a client. The server's names 127.0.0.1 alone."""

    server: Server
    certificates: Certificates
    mine: Tls

    @property
    def mismatched(self) -> str:
        """An address that reaches the server under a name that its certificate does not have."""
        return self.server.address.replace(HOST, "localhost")

    def section(self, user: str, **others: str) -> dict[str, str]:
        """Return what `[kafka]` says for a user."""
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": PASSWORD,
            **encrypted(self.mine),
            **others,
        }

    def add(self, user: str) -> None:
        """Give a user a password of SCRAM."""
        credentials = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4_096)
        change = UserScramCredentialUpsertion(user, credentials, PASSWORD.encode())
        admin = self._admin()
        for answer in admin.alter_user_scram_credentials([change]).values():
            answer.result()

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.server.address, **self.section(ADMIN)})

    def allow(self, user: str, rights: Mapping[tuple[ResourceType, str], list[AclOperation]]) -> None:
        """Give a user rights on what begins with a name; on the cluster itself its name is `kafka-cluster`."""
        bindings = [
            AclBinding(
                kind,
                name,
                ResourcePatternType.LITERAL if kind is ResourceType.BROKER else ResourcePatternType.PREFIXED,
                f"User:{user}",
                "*",
                operation,
                AclPermissionType.ALLOW,
            )
            for (kind, name), operations in rights.items()
            for operation in operations
        ]
        admin = self._admin()
        for answer in admin.create_acls(bindings).values():
            answer.result()


@contextmanager
def secured_kafka(folder: Path, users: list[str]) -> Iterator[Secured]:
    """Run a Kafka with these users and an admin who may do everything."""
    certificates = Certificates(folder / "certs")
    known = " ".join(f'user_{user}="{PASSWORD}"' for user in (ADMIN, *users))
    settings = {
        "listeners": f"SECURE://{HOST}:{{port}},CONTROLLER://{HOST}:{{controller_port}}",
        "listener.security.protocol.map": "SECURE:SASL_SSL,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "SECURE",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.secure.plain.sasl.jaas.config": f'{_LOGIN} required username="{ADMIN}" password="{PASSWORD}" '
        f"{known};",
        "listener.name.secure.scram-sha-256.sasl.jaas.config": f"{_SCRAM} required;",
        "listener.name.secure.ssl.client.auth": "required",  # with SASL, the general setting has no effect
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(key_store(certificates, "kafka", HOST)),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": certificates.trusted.ca_file,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:{ADMIN};User:ANONYMOUS",  # the controller's own listener knows nobody
    }
    with running_kafka(folder / "server", **settings) as server:
        yield Secured(server, certificates, certificates.issue("broker-1"))


def encrypted(tls: Tls) -> dict[str, str]:
    """Return the lines of `[kafka]` for these certificates."""
    return {
        "ssl.ca.location": tls.ca_file,
        "ssl.certificate.location": tls.cert_file,
        "ssl.key.location": tls.key_file,
    }


def key_store(certificates: Certificates, name: str, *hosts: str) -> Path:
    """Return a file of key and certificate, as servers in Java read them; the certificate is made."""
    issued = certificates.issue(name, *hosts, again=True)
    file = certificates.folder / f"{name}-store.pem"
    file.write_text(Path(issued.key_file).read_text() + Path(issued.cert_file).read_text())
    return file

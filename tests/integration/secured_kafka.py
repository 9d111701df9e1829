"""A real Kafka with TLS, logins and ACLs."""

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
)

from memq_localstack.ports import HOST
from memq_localstack.servers import Server
from tests.integration.kafka import running_kafka
from tests.tls import server_context

ADMIN, PASSWORD = "admin", "not a secret"  # every user has this password
_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule"


@dataclass(frozen=True)
class Secured:
    """The server, and the file of the authority that its certificate is of. That names 127.0.0.1, and nothing else."""

    server: Server
    authority: Path

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
            "ssl.ca.location": str(self.authority),
            **others,
        }

    def allow(self, user: str, rights: Mapping[tuple[ResourceType, str], list[AclOperation]]) -> None:
        """Give a user rights on what begins with a name; on the cluster itself its name is `kafka-cluster`."""
        admin = AdminClient({"bootstrap.servers": self.server.address, **self.section(ADMIN)})
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
        for answer in admin.create_acls(bindings).values():
            answer.result()


@contextmanager
def secured_kafka(folder: Path, users: list[str]) -> Iterator[Secured]:
    """Run a Kafka with these users and an admin who may do everything."""
    folder.mkdir(parents=True, exist_ok=True)
    _, authority = server_context(folder, HOST)
    known = " ".join(f'user_{user}="{PASSWORD}"' for user in (ADMIN, *users))
    settings = {
        "listeners": f"SECURE://{HOST}:{{port}},CONTROLLER://{HOST}:{{controller_port}}",
        "listener.security.protocol.map": "SECURE:SASL_SSL,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "SECURE",
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.secure.plain.sasl.jaas.config": f'{_LOGIN} required username="{ADMIN}" password="{PASSWORD}" '
        f"{known};",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(folder / f"server-{HOST}.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:{ADMIN};User:ANONYMOUS",  # the controller's own listener knows nobody
    }
    with running_kafka(folder / "server", **settings) as server:
        yield Secured(server, authority)

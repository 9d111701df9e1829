"""A broker that other machines reach has no encryption and no identity: it refuses to start, or warns."""

from __future__ import annotations

import dataclasses

import pytest

from memq.broker.assembly import serve_cluster
from memq.broker.identity.networks import check_exposure, warn_if_exposed
from memq.errors import InvalidSettingError
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.settings import BrokerSettings, PartSettings
from tests.brokers import events_of, run

EXPOSED = BrokerSettings(port=0, http_port=-1, host="0.0.0.0")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "broker-1.example"])
def test_a_broker_of_a_cluster_does_not_listen_beyond_loopback(host: str) -> None:
    async def work() -> None:
        with pytest.raises(InvalidSettingError, match="without encryption and identity") as found:
            await serve_cluster(dataclasses.replace(EXPOSED, host=host), PartSettings(), lambda address: None)
        assert "insecure = true" in found.value.hint

    run(work())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "::1"])
def test_on_loopback_it_neither_refuses_nor_warns(host: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(EXPOSED, host=host)
    check_exposure(settings, {})
    warn_if_exposed(settings, EventLog(SystemClock()), encrypted=False)
    assert events_of(caplog) == []


def test_an_operator_may_accept_it_and_is_warned_at_each_start(caplog: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(EXPOSED, insecure=True)
    check_exposure(settings, {})
    warn_if_exposed(settings, EventLog(SystemClock()), encrypted=False)
    assert events_of(caplog) == ["insecure"]


@pytest.mark.parametrize(
    ("tls", "tokens", "is_refused"),
    [
        ({"cert_file": "a", "key_file": "b", "ca_file": "c", "clients": "required"}, {}, False),
        ({"cert_file": "a", "key_file": "b"}, {"jwks_file": "k", "required": True}, False),
        ({"cert_file": "a", "key_file": "b"}, {}, True),
        ({"cert_file": "a", "key_file": "b", "clients": "optional"}, {"jwks_file": "k"}, True),
        ({"ca_file": "c", "clients": "required"}, {}, True),
    ],
)
def test_tls_and_an_identity_of_each_client_are_enough(
    tls: dict[str, object], tokens: dict[str, object], is_refused: object, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"tls": tls, "tokens": tokens}
    sections = {name: {key: (value, "test") for key, value in each.items()} for name, each in given.items()}
    if is_refused:
        with pytest.raises(InvalidSettingError, match="without encryption and identity"):
            check_exposure(EXPOSED, sections)
    else:
        check_exposure(EXPOSED, sections)
    warn_if_exposed(EXPOSED, EventLog(SystemClock()), encrypted=True)
    assert events_of(caplog) == []

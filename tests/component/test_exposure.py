"""A broker that other machines reach has no encryption and no identity: it refuses to start, or warns."""

from __future__ import annotations

import dataclasses

import pytest

from memq.broker.assembly import serve_cluster
from memq.broker.exposure import check_exposure, warn_if_exposed
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
    check_exposure(settings)
    warn_if_exposed(settings, EventLog(SystemClock()))
    assert events_of(caplog) == []


def test_an_operator_may_accept_it_and_is_warned_at_each_start(caplog: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(EXPOSED, insecure=True)
    check_exposure(settings)
    warn_if_exposed(settings, EventLog(SystemClock()))
    assert events_of(caplog) == ["insecure"]

"""Times, certificates and options of Celery in the transport of kombu."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from kombu import Connection

import memq.celery
from memq.celery.transport import Transport, addresses_of, due_in_s, tls_of
from memq.errors import InvalidSettingError
from memq.runtime.tls import Tls

assert memq.celery.SCHEME == "memq"


@pytest.mark.parametrize(
    ("eta", "seconds"),
    [
        ("2026-01-01T00:00:30+00:00", 30.0),
        ("2026-01-01T01:00:30+01:00", 30.0),
        ("2026-01-01T00:00:30", 30.0),
        ("2025-12-31T00:00:00+00:00", 0.0),
        ("2099-01-01T00:00:00+00:00", 366 * 86_400.0),
        ("soon", 0.0),
        (None, 0.0),
        ("", 0.0),
    ],
)
def test_the_time_of_a_task_is_a_delay(eta: object, seconds: float) -> None:
    assert due_in_s(eta, 1_767_225_600.0) == seconds


@pytest.mark.parametrize(
    ("ssl", "tls"),
    [
        (None, None),
        (False, None),
        ({}, None),
        (True, Tls()),
        ({"ca_certs": "ca.pem"}, Tls(ca_file="ca.pem")),
        (
            {"ca_certs": "ca.pem", "certfile": "a.pem", "keyfile": "b.pem", "password": None},
            Tls(ca_file="ca.pem", cert_file="a.pem", key_file="b.pem"),
        ),
    ],
)
def test_certificates_have_the_names_of_celery(ssl: Mapping[str, str] | bool | None, tls: Tls | None) -> None:
    assert tls_of(ssl) == tls


@pytest.mark.parametrize("ssl", [{"cafile": "x"}, "yes", {"certfile": "a.pem"}])
def test_mistakes_in_certificates_are_errors(ssl: object) -> None:
    with pytest.raises(InvalidSettingError):
        tls_of(ssl)


def test_a_transport_that_is_not_connected_opens_nothing() -> None:
    connection = Connection("memq://broker-1:1234", transport_options={"queue_name_prefix": "shop."})
    transport = connection.transport
    assert isinstance(transport, Transport)
    assert transport.name_of("celery") == "shop.celery"
    assert not transport.implements.asynchronous
    assert transport.driver_version() == memq.__version__


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("memq://a:1,b:2", "a:1,b:2"),
        ("memq://a,b:2/", "a:9876,b:2"),
        ("memq://", "127.0.0.1:9876"),
        ("memq://[::1]:7,[::2]", "[::1]:7,[::2]:9876"),
        ("broker-1", "broker-1:9876"),
        ("", "127.0.0.1:9876"),
    ],
)
def test_a_url_has_addresses(url: str, addresses: str) -> None:
    assert addresses_of(url, 9876) == addresses


@pytest.mark.parametrize("url", ["memq://a:1/path", "memq://user:secret@a:1", "memq://a?x=1"])
def test_a_url_with_other_parts_is_refused(url: str) -> None:
    with pytest.raises(InvalidSettingError, match="is no URL of brokers"):
        addresses_of(url, 9876)

"""Settings of a bucket: its URL, the section `[s3]`, and its keys from boto3's session."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from memq.errors import DeniedError, InvalidSettingError, UnknownSettingError, UntrustedStoreError
from memq.limits import MIB
from memq.redaction import Redacted
from memq.settings import Section, did_you_mean, read_section, section_setting
from memq.storage_handlers import check_prefix

if TYPE_CHECKING:
    import boto3
    from obstore.auth.boto3 import Boto3CredentialProvider

# S3's own rule for names of buckets, with capitals and underscores, which other servers allow.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}\Z")
# Buckets that can be part of a host name: the certificate of `*.HOST` excludes dots, and host names have no capitals.
_HOST_PART = re.compile(r"[a-z0-9][a-z0-9-]*[a-z0-9]\Z")
_ENDPOINT = re.compile(
    r"https?://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?(/[A-Za-z0-9._~/-]*)?\Z"
)
_WRITE = "write s3://BUCKET/PREFIX?endpoint=http://…"
URL_SETTINGS = ("endpoint", "region", "addressing")  # these may be in the URL, and clients get them
DEFAULT_REGION = "us-east-1"
_REGION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\Z")
# Time for which obstore uses keys before it asks boto3 again; it asks 5 minutes earlier. boto3 gets new keys 10 to 15
# minutes before the old ones expire. With obstore's default of 30 minutes, it would use expired keys.
_KEYS_TTL = timedelta(minutes=6)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class S3Settings(Redacted):
    """The section `[s3]`.

    Without keys in it, boto3 searches the usual ones: environment variables, profile, role of the machine.
    """

    data_path: str = section_setting("obstore", "library that moves the bytes", choices=("obstore", "aiobotocore"))
    endpoint: str = section_setting("", "http(s)://HOST[:PORT] of a server; empty: the endpoint of the region")
    region: str = section_setting("", "region of the bucket; empty: the profile's region, else us-east-1")
    addressing: str = section_setting(
        "auto",
        "bucket in the path or in the host name; auto: path if endpoint is set or the name is no host name",
        choices=("auto", "path", "virtual"),
    )  # fmt: skip
    access_key_id: str = section_setting("", "key id; empty: boto3 searches for keys")
    secret_access_key: str = section_setting("", "secret of that key id")
    session_token: str = section_setting("", "token of temporary keys")
    trusted_endpoints: str = section_setting(
        "", "endpoints that may get signed requests though only brokers name them, with commas"
    )
    profile: str = section_setting("", "profile in the shared configuration of the machine")
    ca_file: str = section_setting(
        "", "PEM file of a certificate authority, trusted in addition to the system's; aiobotocore: instead of them"
    )
    sse: str = section_setting("", "encryption at rest", choices=("", "AES256", "aws:kms", "aws:kms:dsse"))
    sse_kms_key_id: str = section_setting("", "key for aws:kms; empty: the bucket's key")
    storage_class: str = section_setting("", "storage class of objects, such as STANDARD or INTELLIGENT_TIERING")
    confirm_puts: bool = section_setting(
        False, "a HEAD after each PUT whose answer shows no checksum, as with obstore: for servers behind a proxy"
    )
    connections_max: int = section_setting(64, "bound on idle connections; aiobotocore: on all connections", 1, 10_000)
    connect_timeout_ms: int = section_setting(3_000, "timeout of a connect", 10, 60_000)
    request_timeout_ms: int = section_setting(10_000, "timeout of one request; plus 500 ms for each MiB", 10, 3_600_000)
    deadline_ms: int = section_setting(30_000, "time for which one call is retried before it fails", 10, 3_600_000)
    part_bytes: int = section_setting(
        8 * MIB, "size of ranges and parts that are transferred in parallel", 5 * MIB, 1 << 30
    )
    parts_in_flight_max: int = section_setting(4, "ranges or parts of one object in flight", 1, 64)
    multipart_bytes_min: int = section_setting(
        64 * MIB, "size from which an object is uploaded in parts", 5 * MIB, 5 << 30
    )
    hedge_permille: int = section_setting(
        50, "share of requests that may be sent a second time because they are slow; 0 for none", 0, 1_000
    )


@dataclass(frozen=True, slots=True)
class Bucket:
    """The location of objects: a bucket, and the prefix of every key (empty, or ending in a slash)."""

    name: str
    prefix: str
    settings: S3Settings

    @property
    def url(self) -> str:
        """The URL for clients: without keys, with the settings that they need to find the bucket."""
        values = {name: getattr(self.settings, name) for name in URL_SETTINGS}
        query = urlencode({name: value for name, value in values.items() if value not in ("", "auto")}, safe=":/")
        return f"s3://{self.name}/{self.prefix.rstrip('/')}".rstrip("/") + (f"?{query}" if query else "")

    @property
    def location(self) -> str:
        """The bucket for messages."""
        return f"bucket '{self.name}' at {self.settings.endpoint or 'its region'}"

    @property
    def path_style(self) -> bool:
        """Whether the bucket is part of the request's path, not of the host's name."""
        chosen = self.settings.addressing
        return chosen == "path" or (
            chosen == "auto" and bool(self.settings.endpoint or not _HOST_PART.match(self.name))
        )


def read_bucket(url: str, section: Section) -> Bucket:
    """Return the bucket that `s3://BUCKET/PREFIX?endpoint=…&region=…&addressing=…` names; the URL wins.

    Raises: InvalidSettingError, UnknownSettingError with a "did you mean", InvalidRequestError for the prefix.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:  # a malformed IPv6 address
        raise InvalidSettingError(f"'{url[:120]}' is no URL: {error}", hint=_WRITE) from error
    if parts.scheme != "s3" or not parts.netloc or parts.fragment:
        raise InvalidSettingError(f"'{url[:120]}' names no bucket", hint=_WRITE)
    if not _BUCKET.match(parts.netloc):
        text = f"'{parts.netloc[:120]}' in '{url[:120]}' is no name of a bucket"
        raise InvalidSettingError(text, hint="3 to 63 small letters, digits, dots and hyphens")
    values: dict[str, tuple[object, str]] = dict(section)
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in URL_SETTINGS:
            raise UnknownSettingError(f"unknown setting '{name}' in {url[:120]}", hint=did_you_mean(name, URL_SETTINGS))
        values[name] = (value, "the store's URL")
    settings = read_section("s3", values, S3Settings)
    _check_together(settings)
    folder = parts.path.strip("/")
    return Bucket(parts.netloc, check_prefix(f"{folder}/") if folder else "", settings)


def check_trust(url: str, section: Section, own_urls: Iterable[str]) -> None:
    """Check that the user's own configuration names the endpoint in a URL that came from a broker.

    A request is signed with the user's keys, and has their session token. A false broker would collect them. `own_urls`
    are endpoints and stores of the configuration. Without an endpoint, the requests go to AWS.
    Raises: UntrustedStoreError; errors of the settings.
    """
    read_bucket(url, section)
    named = _endpoint_of(url)
    if not named:
        return
    settings = read_section("s3", section, S3Settings)
    own = {settings.endpoint, *settings.trusted_endpoints.split(",")}
    for each in own_urls:
        own |= {_endpoint_of(each)} if _endpoint_of(each) else set(each.split(","))
    if _plain(named) not in {_plain(each) for each in own}:
        raise UntrustedStoreError(
            f"a broker names the store '{url[:200]}', and the endpoint '{named[:120]}' is not in your configuration",
            hint=f"if it is right, set trusted_endpoints = '{named[:120]}' in [s3], or MEMQ_S3_TRUSTED_ENDPOINTS",
        )


def _endpoint_of(url: str) -> str:
    """Return the endpoint in the URL of a store; empty without one."""
    try:
        query = urlsplit(url).query
    except ValueError:
        return ""
    return dict(parse_qsl(query)).get("endpoint", "") if url.startswith("s3:") else ""


def _plain(endpoint: str) -> str:
    return endpoint.strip().rstrip("/").lower()


def _check_together(settings: S3Settings) -> None:
    endpoint = _ENDPOINT.match(settings.endpoint)
    if settings.endpoint and (endpoint is None or int(endpoint["port"] or 0) > 65_535):
        raise InvalidSettingError(
            f"setting endpoint = '{settings.endpoint[:120]}' of [s3] is no URL", hint="write http(s)://HOST:PORT"
        )
    if endpoint is not None and settings.addressing == "virtual" and _is_number(endpoint["host"]):
        raise InvalidSettingError(
            f"[s3] has addressing = 'virtual', but no bucket name can precede the address {endpoint['host']}",
            hint="name the server's host in endpoint, or set addressing = 'path'",
        )
    if bool(settings.access_key_id) != bool(settings.secret_access_key):
        raise InvalidSettingError("[s3] has one of access_key_id and secret_access_key", hint="give both, or neither")
    if settings.sse_kms_key_id and not settings.sse.startswith("aws:kms"):
        raise InvalidSettingError(f"[s3] has sse_kms_key_id, but sse = '{settings.sse}'", hint="set sse = 'aws:kms'")
    if settings.request_timeout_ms > settings.deadline_ms:
        raise InvalidSettingError(
            f"[s3] request_timeout_ms = {settings.request_timeout_ms} is over deadline_ms = {settings.deadline_ms}"
        )


def _is_number(host: str) -> bool:
    """Whether a host is an IP address, not a name."""
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def missing_extra(library: str | None) -> InvalidSettingError:
    """Return the error for missing S3 libraries."""
    return InvalidSettingError(
        f"the library '{library}' for S3 is not installed", hint="install it with: pip install 'memq[s3]'"
    )


def open_session(bucket: Bucket) -> boto3.session.Session:
    """Return boto3's session for a bucket. It reads the shared configuration.

    boto3 fetches the keys of a role later.

    Raises: InvalidSettingError when the extra is missing, or there is no such profile.
    """
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise missing_extra(error.name) from error
    settings = bucket.settings
    try:
        return boto3.session.Session(
            aws_access_key_id=settings.access_key_id or None,
            aws_secret_access_key=settings.secret_access_key or None,
            aws_session_token=settings.session_token or None,
            region_name=settings.region or None,
            profile_name=settings.profile or None,
        )
    except BotoCoreError as error:
        raise InvalidSettingError(f"no session for S3: {error}", hint="check profile in [s3]") from error


def region_of(bucket: Bucket, session: boto3.session.Session) -> str:
    """Return the region for which requests are signed.

    Raises: InvalidSettingError for a text that can't be a region.
    """
    name = str(bucket.settings.region or session.region_name or DEFAULT_REGION)
    if not _REGION.match(name):
        raise InvalidSettingError(
            f"region '{name[:60]}' is no name of a region", hint="check region in [s3], in the store's URL, the profile"
        )
    return name


def authority_file(bucket: Bucket, session: boto3.session.Session) -> str | None:
    """Return the file of an own certificate authority: from the setting, else from boto3.

    The result is None when neither names one.
    """
    name = bucket.settings.ca_file or _sdk_session(session).get_config_variable("ca_bundle")
    return str(name) if name else None


def authority_of(bucket: Bucket, session: boto3.session.Session) -> bytes | None:
    """Return the certificates, PEM, that are trusted in addition to the system's; None for no others.

    Raises: InvalidSettingError when the file can't be read.
    """
    name = authority_file(bucket, session)
    if name is None:
        return None
    try:
        text = Path(name).read_bytes()
    except OSError as error:
        raise InvalidSettingError(
            f"can't read ca_file '{name}': {error.strerror}", hint="check ca_file in [s3]"
        ) from error
    if b"-----BEGIN CERTIFICATE-----" not in text:
        raise InvalidSettingError(f"ca_file '{name}' holds no certificate", hint="give a PEM file")
    return text


def check_keys(bucket: Bucket, session: boto3.session.Session) -> None:
    """Raise DeniedError when boto3 finds no keys, or fails to read them."""
    from botocore.exceptions import BotoCoreError

    try:
        why = None if session.get_credentials() is not None else "none are set"
    except (BotoCoreError, OSError, ValueError) as error:  # one key of two, a failing credential process, a wrong role
        why = (str(error).strip() or type(error).__name__)[:300]
    if why is not None:
        raise DeniedError(
            f"no keys for {bucket.location}: {why}",
            hint="set access_key_id and secret_access_key in [s3], or what boto3 reads: variables, a profile, a role",
        )


def obstore_keys(session: boto3.session.Session) -> Boto3CredentialProvider:
    """Return the provider of obstore's keys. It renews its answers before the keys expire."""
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider(session, ttl=_KEYS_TTL)


def _sdk_session(session: boto3.session.Session) -> Any:
    return session._session  # the only access to settings that boto3 itself does not show

"""Keys for the bucket, found by boto3's session: settings, variables, profiles, or the role of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memq.errors import DeniedError, InvalidSettingError
from memq.storage_handlers.s3.settings import Bucket

if TYPE_CHECKING:
    import boto3

DEFAULT_REGION = "us-east-1"


def missing_extra(library: str | None) -> InvalidSettingError:
    """Return what to say when the libraries for S3 are not installed."""
    return InvalidSettingError(
        f"the library '{library}' for S3 is not installed", hint="install it with: pip install 'memq[s3]'"
    )


def open_session(bucket: Bucket) -> boto3.session.Session:
    """Return boto3's session for a bucket. It reads the shared configuration; a role's keys are fetched later.

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
    """Return the region that requests are signed for."""
    return bucket.settings.region or session.region_name or DEFAULT_REGION


def authority_file(bucket: Bucket, session: boto3.session.Session) -> str | None:
    """Return the file of an own certificate authority: the setting, else what boto3 reads; None when there is none."""
    name = bucket.settings.ca_file or _sdk_session(session).get_config_variable("ca_bundle")
    return str(name) if name else None


def authority_of(bucket: Bucket, session: boto3.session.Session) -> bytes | None:
    """Return the certificates, PEM, that are trusted besides the system's; None for no others.

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
    """Raise DeniedError when no keys are found anywhere."""
    if session.get_credentials() is None:
        raise DeniedError(
            f"no keys for {bucket.place}",
            hint="set access_key_id and secret_access_key in [s3], or what boto3 reads: variables, a profile, a role",
        )


def _sdk_session(session: boto3.session.Session) -> Any:
    return session._session  # the only way to settings that boto3 itself does not show

"""Keys for the bucket from boto3's session: settings, variables, profiles, machine role."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memq.errors import DeniedError, InvalidSettingError
from memq.storage_handlers.s3.settings import Bucket

if TYPE_CHECKING:
    import boto3
    from obstore.auth.boto3 import Boto3CredentialProvider

DEFAULT_REGION = "us-east-1"
_REGION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\Z")
# How long obstore uses keys without asking boto3 again, next to the 5 minutes by which it asks earlier. boto3 gets new
# ones 10 to 15 minutes before the old are over: with obstore's own half an hour, old ones would be used after that.
_KEYS_TTL = timedelta(minutes=6)


def missing_extra(library: str | None) -> InvalidSettingError:
    """Return what to say when the libraries for S3 are not installed."""
    return InvalidSettingError(
        f"the library '{library}' for S3 is not installed", hint="install it with: pip install 'memq[s3]'"
    )


def open_session(bucket: Bucket) -> boto3.session.Session:
    """Return boto3's session for a bucket. It reads the shared configuration.

    A role's keys are fetched later.

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
    """Return the region that requests are signed for.

    Raises: InvalidSettingError for what is no name of one.
    """
    name = str(bucket.settings.region or session.region_name or DEFAULT_REGION)
    if not _REGION.match(name):
        raise InvalidSettingError(
            f"region '{name[:60]}' is no name of a region", hint="check region in [s3], in the store's URL, the profile"
        )
    return name


def authority_file(bucket: Bucket, session: boto3.session.Session) -> str | None:
    """Return the file of an own certificate authority: the setting, else what boto3 reads.

    The result is None when there is none.
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
    """Raise DeniedError when no keys are found anywhere, or the place that has them is unsound."""
    from botocore.exceptions import BotoCoreError

    try:
        why = None if session.get_credentials() is not None else "none are set"
    except (BotoCoreError, OSError, ValueError) as error:  # half a pair, a process for them that fails, a wrong role
        why = (str(error).strip() or type(error).__name__)[:300]
    if why is not None:
        raise DeniedError(
            f"no keys for {bucket.place}: {why}",
            hint="set access_key_id and secret_access_key in [s3], or what boto3 reads: variables, a profile, a role",
        )


def obstore_keys(session: boto3.session.Session) -> Boto3CredentialProvider:
    """Return where obstore gets keys from. Its answers are over before the keys are."""
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider(session, ttl=_KEYS_TTL)


def _sdk_session(session: boto3.session.Session) -> Any:
    return session._session  # the only way to settings that boto3 itself does not show

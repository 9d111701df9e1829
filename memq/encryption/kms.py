"""Data keys wrapped by AWS KMS: the key of a bucket's owner never leaves the service."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from memq.encryption.cipher import KEY_BYTES
from memq.encryption.keys import DataKey
from memq.errors import InvalidSettingError, KeyMissingError, KeyProviderError
from memq.limits import ENVELOPE_KEY_ID_BYTES_MAX, ENVELOPE_WRAPPED_KEY_BYTES_MAX

_CONTEXT = {"memq": "data-key"}  # a policy can name it: kms:EncryptionContext:memq
_REFUSED = frozenset(
    {
        *("AccessDeniedException", "DisabledException", "IncorrectKeyException", "InvalidCiphertextException"),
        *("InvalidKeyUsageException", "KMSInvalidStateException", "NotFoundException"),
    }
)


class KmsKeys:
    """A `KeyProvider` over keys of AWS KMS: `KEY[,KEY…]`, each an ARN, an id or `alias/NAME`.

    boto3 finds the credentials. The first key wraps new data keys. Only these keys open a block: a stranger could name
    a KMS key of its own. KMS keeps the earlier versions of a key that it rotates, so its rotations need no step here.
    """

    def __init__(self, keys: str, client: Any = None) -> None:
        try:
            import boto3
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as missing:
            raise InvalidSettingError("AWS KMS needs the package boto3", hint="pip install 'memq[s3]'") from missing
        self._keys = [key.strip() for key in keys.split(",")]
        self._client = client if client is not None else boto3.client("kms")
        self._failures, self._answered = (BotoCoreError, ClientError), ClientError

    def new_data_key(self) -> DataKey:
        """See `KeyProvider`."""
        found = self._call("generate_data_key", KeyId=self._keys[0], KeySpec="AES_256")
        key_id, wrapped = str(found["KeyId"]), bytes(found["CiphertextBlob"])
        if len(key_id.encode()) > ENVELOPE_KEY_ID_BYTES_MAX or len(wrapped) > ENVELOPE_WRAPPED_KEY_BYTES_MAX:
            raise InvalidSettingError(f"KMS answers with a key id of {len(key_id)} and a key of {len(wrapped)} bytes")
        return DataKey(key_id, self._plain(found), wrapped)

    def unwrap(self, key_id: str, wrapped: bytes) -> bytes:
        """See `KeyProvider`. KMS refuses a data key that another KMS key has wrapped."""
        for key in self._keys[:-1]:
            with suppress(KeyMissingError):
                return self._plain(self._call("decrypt", KeyId=key, CiphertextBlob=wrapped))
        try:
            return self._plain(self._call("decrypt", KeyId=self._keys[-1], CiphertextBlob=wrapped))
        except KeyMissingError as error:
            raise KeyMissingError(f"block with a data key of '{key_id[:200]}': {error}", hint=error.hint) from error

    def _plain(self, answer: Any) -> bytes:
        plain = bytes(answer["Plaintext"])
        if len(plain) != KEY_BYTES:
            raise KeyProviderError(f"KMS answers with a data key of {len(plain)} bytes")
        return plain

    def _call(self, name: str, **arguments: Any) -> Any:
        try:
            return getattr(self._client, name)(EncryptionContext=_CONTEXT, **arguments)
        except self._failures as error:
            answer = error.response.get("Error", {}) if isinstance(error, self._answered) else {}
            if answer.get("Code") in _REFUSED:
                raise KeyMissingError(
                    f"KMS refuses {name} with key '{arguments['KeyId'][:200]}': {answer['Code']}",
                    hint="check the key's state and policy, and that it is the key that encrypted the block",
                ) from error
            raise KeyProviderError(f"KMS fails {name}: {error}") from error

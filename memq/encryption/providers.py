"""The key provider of a name such as `file:PATH`."""

from __future__ import annotations

from pathlib import Path

from memq.encryption.keys import KeyProvider, environment_keys, file_keys
from memq.errors import InvalidSettingError

_FORMS = "write file:PATH, env:VARIABLE or aws-kms:KEY"


def provider_of(text: str) -> KeyProvider:
    """Return the provider of a name such as `file:PATH`. Raises: InvalidSettingError, KeyProviderError."""
    kind, _, rest = text.partition(":")
    if not rest or kind not in ("file", "env", "aws-kms"):
        raise InvalidSettingError(f"encryption = '{text[:200]}' names no key provider", hint=_FORMS)
    if kind == "file":
        return file_keys(Path(rest))
    if kind == "env":
        return environment_keys(rest)
    from memq.encryption.kms import KmsKeys

    return KmsKeys(rest)

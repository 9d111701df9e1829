"""Meaning of a store's answers, and the resulting errors. Pure.

Theory: each library has its own exceptions for S3's answers. Both data paths convert these to a status and a code.
Only this module decides the consequence: retry, read the object, or raise an error. The code decides, not the status:
S3 answers 400 for a body that came too slowly, and proxies answer 400, 403 and 404 in its place. Only known final codes
are final. Every other refusal is retried until the call's deadline, and then raised as a failure that may pass.
"""

from __future__ import annotations

from enum import Enum

from memq.errors import CorruptDataError, DeniedError, InvalidRequestError, MemqError, NotFoundError, StoreError


class Meaning(Enum):
    """The consequence of an answer."""

    TRY_AGAIN = "it may pass"
    SLOW_DOWN = "the server asks for less"
    TAKEN = "something lies under the key, or is being put there"
    DENIED = "a right is missing, or the keys are wrong"
    NO_KEY = "the object does not exist"
    NO_BUCKET = "the bucket does not exist"
    NO_RANGE = "the object ends before the range begins"
    DAMAGED = "the bytes were changed on their way"
    REFUSED = "the request can't succeed as it is"
    UNEXPLAINED = "refused for no reason that S3 has: a proxy, or a code that is not known here"


class StoreAnswer(Exception):  # noqa: N818 - not an error of memq: it never leaves this package
    """An answer that is no success. With `status` 0 no answer came, and the effect is unknown."""

    def __init__(self, status: int, code: str = "", text: str = "", *, has_body: bool = True) -> None:
        """`has_body` is false for the answer to a HEAD, which has no error code."""
        super().__init__(" ".join(part for part in (str(status or ""), code, text) if part))
        self.status = status
        self.code = code
        self.text = text
        self.has_body = has_body

    @property
    def meaning(self) -> Meaning:
        """The consequence."""
        return meaning(self.status, self.code, has_body=self.has_body)


_BY_CODE = {
    "SlowDown": Meaning.SLOW_DOWN,
    "TooManyRequests": Meaning.SLOW_DOWN,
    "RequestTimeout": Meaning.TRY_AGAIN,  # 400: the body came too slowly
    "RequestTimeoutException": Meaning.TRY_AGAIN,
    "TemporaryRedirect": Meaning.TRY_AGAIN,  # 307
    "PriorRequestNotComplete": Meaning.TRY_AGAIN,
    "ClientDisconnected": Meaning.TRY_AGAIN,
    "InvalidPart": Meaning.TRY_AGAIN,  # 400: the parts of a multipart upload are gone; the next try sends them again
    "KMS.InternalException": Meaning.TRY_AGAIN,  # 400
    "KMS.KeyUnavailableException": Meaning.TRY_AGAIN,
    "KMS.ThrottlingException": Meaning.SLOW_DOWN,
    "BandwidthLimitExceeded": Meaning.SLOW_DOWN,
    "RequestLimitExceeded": Meaning.SLOW_DOWN,
    "RequestThrottled": Meaning.SLOW_DOWN,
    "Throttling": Meaning.SLOW_DOWN,
    "ThrottlingException": Meaning.SLOW_DOWN,
    "IncompleteBody": Meaning.TRY_AGAIN,
    "BadDigest": Meaning.DAMAGED,
    "InvalidDigest": Meaning.DAMAGED,
    "XAmzContentChecksumMismatch": Meaning.DAMAGED,
    "ExpiredToken": Meaning.DENIED,  # 400
    "InvalidToken": Meaning.DENIED,
    "NoSuchBucket": Meaning.NO_BUCKET,
    "NoSuchKey": Meaning.NO_KEY,
    "NoSuchUpload": Meaning.TRY_AGAIN,  # 404: of a multipart upload that another client ended
}
_FINAL_CODES = (
    *("AuthorizationHeaderMalformed", "EntityTooLarge", "EntityTooSmall", "InvalidArgument", "InvalidBucketName"),
    *("InvalidEncryptionAlgorithmError", "InvalidLocationConstraint", "InvalidRequest", "InvalidStorageClass"),
    *("InvalidURI", "KeyTooLongError", "MalformedXML", "MetadataTooLarge", "MissingSecurityHeader"),
    *("KMS.DisabledException", "KMS.InvalidKeyUsageException", "KMS.KMSInvalidStateException"),
    *("KMS.NotFoundException", "UnexpectedContent", "UnsupportedArgument", "UnsupportedOperation"),
)
_DENYING_CODES = (
    *("AccessDenied", "AccessDeniedException", "AccountProblem", "AllAccessDisabled", "InvalidAccessKeyId"),
    *("InvalidObjectState", "InvalidPayer", "InvalidSecurity", "KMS.AccessDeniedException"),
    *("NotSignedUp", "RequestTimeTooSkewed", "SignatureDoesNotMatch"),
)
_BY_CODE |= dict.fromkeys(_FINAL_CODES, Meaning.REFUSED) | dict.fromkeys(_DENYING_CODES, Meaning.DENIED)
_BY_STATUS = {
    0: Meaning.TRY_AGAIN,
    307: Meaning.TRY_AGAIN,
    400: Meaning.UNEXPLAINED,
    401: Meaning.DENIED,
    403: Meaning.UNEXPLAINED,
    404: Meaning.UNEXPLAINED,
    408: Meaning.TRY_AGAIN,
    409: Meaning.TAKEN,  # two concurrent puts of one key: S3 names the winner only later
    412: Meaning.TAKEN,
    416: Meaning.NO_RANGE,
    429: Meaning.SLOW_DOWN,
    501: Meaning.REFUSED,  # not implemented: a retry can't succeed
}
_HINTS = {
    "RequestTimeTooSkewed": "set the clock of this machine: it is too far from the server's",
    "SignatureDoesNotMatch": "check secret_access_key in [s3], and the profile",
    "InvalidAccessKeyId": "check access_key_id in [s3], and the profile: the server does not know it",
    "ExpiredToken": "the temporary keys are over: get new ones",
    "AuthorizationHeaderMalformed": "set region in [s3] to the bucket's",
    "PermanentRedirect": "set region and endpoint in [s3] to the bucket's",
    "NotImplemented": "the server can't do this: use one that knows If-None-Match on PUT",
    "InvalidStorageClass": "set storage_class in [s3] to one that the server has",
    "NoCredentials": "check what boto3 reads keys from: variables, a profile, a role",
}
# The keys or the clock are wrong: no right is missing, and the hints above name the cause.
CREDENTIAL_CODES = frozenset(
    {
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "InvalidAccessKeyId",
        "ExpiredToken",
        "InvalidToken",
        "NoCredentials",
    }
)


_BY_STATUS_OF_HEAD = {403: Meaning.DENIED, 404: Meaning.NO_KEY}


def meaning(status: int, code: str, *, has_body: bool = True) -> Meaning:
    """Return the consequence of a status and of S3's code, which may be empty.

    For an answer to a HEAD, `has_body` is false.
    """
    known = _BY_CODE.get(code)
    if known is None and not has_body:
        known = _BY_STATUS_OF_HEAD.get(status)
    known = known or _BY_STATUS.get(status)
    if known is not None:
        return known
    return Meaning.TRY_AGAIN if status >= 500 else Meaning.REFUSED


MAY_PASS = (Meaning.TRY_AGAIN, Meaning.SLOW_DOWN, Meaning.DAMAGED, Meaning.UNEXPLAINED)


def error_for(answer: StoreAnswer, failure: str, location: str, key: str = "") -> MemqError:
    """Return memq's error for an answer; `failure` begins its text, `location` names the bucket.

    `key` is used for NO_KEY only, which callers of `Attempts.run` handle.
    """
    hint = _hint(answer)
    match answer.meaning:
        case Meaning.NO_KEY:
            return NotFoundError(f"object '{key}' does not exist")
        case Meaning.NO_BUCKET:
            return InvalidRequestError(
                f"{failure}: {location} does not exist", hint="make it, or correct the store's URL"
            )
        case Meaning.DENIED:
            return DeniedError(f"{failure}: {location} says {answer}", hint=hint)
        case Meaning.DAMAGED if answer.status == 200:
            return CorruptDataError(f"{failure}: {answer.text}")
        case Meaning.TRY_AGAIN | Meaning.SLOW_DOWN | Meaning.TAKEN | Meaning.DAMAGED | Meaning.UNEXPLAINED:
            without_keys = answer.code == "NoCredentials"
            silent = "can't be asked without keys" if without_keys else "gives no answer"
            reply = f"says {answer}" if answer.status else f"{silent}: {answer.text}"
            return StoreError(f"{failure}: {location} {reply}", hint=hint or _reach_hint(answer))
        case _:
            return InvalidRequestError(f"{failure}: {location} says {answer}", hint=hint)


def _hint(answer: StoreAnswer) -> str:
    if answer.code.startswith("KMS."):
        return "check sse_kms_key_id in [s3], and the right to use that key"
    if answer.meaning in (Meaning.REFUSED, Meaning.UNEXPLAINED) and not answer.code:
        return "check endpoint in [s3]: what answers there may be no S3"
    return _HINTS.get(answer.code, "")


def _reach_hint(answer: StoreAnswer) -> str:
    """Return the hint for a missing answer; words of the TLS libraries reveal a wrong certificate."""
    text = answer.text.lower()
    if any(word in text for word in ("certificate", "ssl")):
        return "give the server's certificate authority as ca_file in [s3], and name the host as its certificate does"
    return "" if answer.status else "check endpoint in [s3] or in the store's URL, and that the server runs"

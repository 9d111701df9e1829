"""SCRAM-SHA-256: both sides prove that they know a password, and neither sends it. Pure.

Source: RFC 5802 and RFC 7677, without channel binding: the exchange runs inside TLS alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import stringprep
import unicodedata

import msgspec

from memq.errors import DeniedError, InvalidRequestError, ProtocolError

ITERATIONS = 32_768  # about 10 ms of a client's CPU for each connection; RFC 7677 wants 4,096 at least
ITERATIONS_MIN, ITERATIONS_MAX = 4_096, 1_000_000
SALT_BYTES = NONCE_BYTES = 16
USER_CHARS_MAX, PASSWORD_CHARS_MAX = 200, 1_024
_GS2_HEADER = "n,,"
_BINDING = base64.b64encode(_GS2_HEADER.encode()).decode()
_FORBIDDEN = (
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
)


class Credential(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The stored secrets of a user: they check a password and can't log in. The bytes are in base64."""

    user: str
    iterations: int
    salt: str
    stored_key: str
    server_key: str

    def __repr__(self) -> str:
        return f"Credential(user={self.user!r})"


def credential_of(user: str, password: str, salt: bytes, iterations: int = ITERATIONS) -> Credential:
    """Return the credential of a new password. Raises: InvalidRequestError."""
    check_user(user)
    client_key, server_key = _keys(password, salt, iterations)
    return Credential(
        user=user,
        iterations=iterations,
        salt=_text(salt),
        stored_key=_text(hashlib.sha256(client_key).digest()),
        server_key=_text(server_key),
    )


def check_credential(credential: Credential) -> Credential:
    """Return a sound credential. Raises: InvalidRequestError."""
    check_user(credential.user)
    try:
        sizes = [len(_bytes(each)) for each in (credential.salt, credential.stored_key, credential.server_key)]
    except ProtocolError as error:
        raise InvalidRequestError("a credential is no base64") from error
    if (
        sizes[1:] != [32, 32]
        or not 8 <= sizes[0] <= 64
        or not ITERATIONS_MIN <= credential.iterations <= ITERATIONS_MAX
    ):
        raise InvalidRequestError(f"the credential of user '{credential.user[:60]}' is not sound")
    return credential


def check_user(user: str) -> None:
    """Raise InvalidRequestError for a name that no user can have."""
    if not 0 < len(user) <= USER_CHARS_MAX or not user.isprintable() or "*" in user:
        raise InvalidRequestError(
            f"user {user[:60]!a} is no name", hint=f"give 1 to {USER_CHARS_MAX} printable characters without '*'"
        )


def decoy_credential(secret: bytes, user: str) -> Credential:
    """Return a credential that no password fits, always the same for a user.

    So a peer can't find which users exist.
    """
    salt = hmac.digest(secret, user.encode(), "sha256")[:SALT_BYTES]
    return Credential(
        user=user,
        iterations=ITERATIONS,
        salt=_text(salt),
        stored_key=_text(hmac.digest(secret, salt, "sha256")),
        server_key=_text(salt * 2),
    )


class ScramClient:
    """The side that has the password. `first`, `final`, `check` are called in this order."""

    def __init__(self, user: str, password: str, nonce: str) -> None:
        self._password = password
        self._nonce = nonce
        self._bare = f"n={_escape(user)},r={nonce}"
        self._server_signature = b""

    def first(self) -> str:
        """Return the first message."""
        return _GS2_HEADER + self._bare

    def final(self, challenge: str) -> str:
        """Return the proof for the broker's first message. Raises: ProtocolError; InvalidRequestError."""
        found = _attributes(challenge, "rsi")
        salt, iterations = _bytes(found["s"]), _number(found["i"])
        if not found["r"].startswith(self._nonce) or len(found["r"]) <= len(self._nonce) or not salt:
            raise ProtocolError("the broker's challenge is not for this client")
        if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:  # fewer would expose the password to a false broker
            raise ProtocolError(f"the broker wants {iterations} iterations of SCRAM")
        client_key, server_key = _keys(self._password, salt, iterations)
        bare = f"c={_BINDING},r={found['r']}"
        signed = f"{self._bare},{challenge},{bare}".encode()
        proof = _xor(client_key, hmac.digest(hashlib.sha256(client_key).digest(), signed, "sha256"))
        self._server_signature = hmac.digest(server_key, signed, "sha256")
        return f"{bare},p={_text(proof)}"

    def check(self, verdict: str) -> None:
        """Check that the broker knows the credential. Raises: DeniedError, ProtocolError."""
        given = _bytes(_attributes(verdict, "v")["v"])
        if not self._server_signature or not hmac.compare_digest(given, self._server_signature):
            raise DeniedError("the broker does not know the password of this user", hint="check the broker's address")


class ScramServer:
    """The side that has the credential of the user that `user_of` found in the first message."""

    def __init__(self, first: str, credential: Credential, nonce: str) -> None:
        bare = first.removeprefix(_GS2_HEADER)
        self.credential = credential
        self._nonce = _attributes(bare, "nr")["r"] + nonce
        self.challenge = f"r={self._nonce},s={credential.salt},i={credential.iterations}"
        self._signed = f"{bare},{self.challenge}"

    def verdict(self, final: str) -> str | None:
        """Return the last message, None if the proof is wrong. Raises: ProtocolError."""
        found = _attributes(final, "crp")
        if found["c"] != _BINDING or found["r"] != self._nonce:
            raise ProtocolError("the proof of SCRAM is not for this exchange")
        signed = f"{self._signed},{final.rpartition(',p=')[0]}".encode()
        stored_key, proof = _bytes(self.credential.stored_key), _bytes(found["p"])
        if len(proof) != len(stored_key):
            return None
        client_key = _xor(proof, hmac.digest(stored_key, signed, "sha256"))
        if not hmac.compare_digest(hashlib.sha256(client_key).digest(), stored_key):
            return None
        return f"v={_text(hmac.digest(_bytes(self.credential.server_key), signed, 'sha256'))}"


def user_of(first: str) -> str:
    """Return the user in a client's first message. Raises: ProtocolError."""
    if not first.startswith(_GS2_HEADER):
        raise ProtocolError("the first message of SCRAM asks for what this broker does not have")
    found = _attributes(first.removeprefix(_GS2_HEADER), "nr")
    name = found["n"].replace("=2C", ",").replace("=3D", "=")
    if not found["r"] or not 0 < len(name) <= USER_CHARS_MAX:
        raise ProtocolError("the first message of SCRAM has no user, or no nonce")
    return name


def prepared(password: str) -> bytes:
    """Return a password as SCRAM hashes it (SASLprep, RFC 4013). Raises: InvalidRequestError."""
    mapped = "".join(
        " " if stringprep.in_table_c12(each) else each for each in password if not stringprep.in_table_b1(each)
    )
    normal = unicodedata.normalize("NFKC", mapped)
    if not 0 < len(normal) <= PASSWORD_CHARS_MAX or any(test(each) for each in normal for test in _FORBIDDEN):
        raise InvalidRequestError(
            "the password is empty, too long, or has a character that none may have",
            hint=f"give 1 to {PASSWORD_CHARS_MAX} characters, without control characters",
        )
    return normal.encode()


def _keys(password: str, salt: bytes, iterations: int) -> tuple[bytes, bytes]:
    """Return the client's key and the server's key."""
    salted = hashlib.pbkdf2_hmac("sha256", prepared(password), salt, iterations)
    return hmac.digest(salted, b"Client Key", "sha256"), hmac.digest(salted, b"Server Key", "sha256")


def _attributes(message: str, names: str) -> dict[str, str]:
    """Return the attributes of a message, which has exactly these, in this order. Raises: ProtocolError."""
    parts = message.split(",")
    if [part[:2] for part in parts] != [f"{name}=" for name in names]:
        raise ProtocolError("a message of SCRAM has other attributes than it must have")
    return {part[0]: part[2:] for part in parts}


def _escape(user: str) -> str:
    return user.replace("=", "=3D").replace(",", "=2C")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProtocolError("a message of SCRAM is no base64") from error


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ProtocolError("a message of SCRAM has no number of iterations")
    return int(text)


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))

"""`memq certs`: a private authority for brokers and clients, and its certificates."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from memq.cli.options import json_option
from memq.cli.output import print_done, print_json, print_table
from memq.errors import AlreadyExistsError, InvalidNameError, InvalidSettingError, NotFoundError
from memq.runtime.clock import SystemClock

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as missing:
    hint = "pip install 'memq[certs]'"
    raise InvalidSettingError("memq certs needs the package cryptography", hint=hint) from missing

AUTHORITY = "ca"
AUTHORITY_DAYS = 3_650
DAYS = 397
NAME_CHARS_MAX = 64  # of a common name, by RFC 5280
_BEFORE = datetime.timedelta(minutes=5)  # clocks of other machines may be behind


@click.group()
def certs() -> None:
    """Make and show the certificates of brokers and clients."""


_folder_option = click.option(
    "--dir", "folder", default="certs", metavar="DIR", show_default=True, help="Folder of the authority."
)


@certs.command()
@_folder_option
@click.option("--name", default="memq", show_default=True, help="Name of the authority.")
@click.option("--days", default=AUTHORITY_DAYS, type=click.IntRange(1, 36_500), show_default=True, help="Validity.")
@json_option
def init(folder: str, name: str, days: int, *, as_json: bool) -> None:
    """Make an authority: ca.pem, which brokers and clients trust, and ca-key.pem, which stays secret."""
    place = Path(folder)
    cert_file, key_file = _files(place, AUTHORITY)
    if cert_file.exists() or key_file.exists():
        raise AlreadyExistsError(f"'{cert_file}' or '{key_file}' exists", hint="choose another folder with --dir")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = _new_key()
    subject = _subject(name)
    usage = {"key_cert_sign": True, "crl_sign": True}
    builder = _builder(subject, subject, key, days).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    certificate = _signed(builder.add_extension(_usage(**usage), critical=True), key)
    _write(key_file, _key_bytes(key), 0o600)
    _write(cert_file, _cert_bytes(certificate), 0o644)
    print_done(
        f"authority '{name}' in {place}: copy {cert_file.name} to brokers and clients, keep {key_file.name}",
        {"name": name, "certificate": str(cert_file), "key": str(key_file)},
        as_json=as_json,
    )


@certs.command()
@click.argument("name")
@click.option("--host", "hosts", multiple=True, help="Host or IP address of a broker; repeatable. None: a client.")
@_folder_option
@click.option("--days", default=DAYS, type=click.IntRange(1, 3_650), show_default=True, help="Validity.")
@click.option("--replace", is_flag=True, help="Replace the files of NAME. Brokers load them without a restart.")
@json_option
def issue(name: str, hosts: Sequence[str], folder: str, days: int, *, replace: bool, as_json: bool) -> None:
    """Make the certificate NAME.pem and the key NAME-key.pem. NAME is how brokers know its holder."""
    place = Path(folder)
    if name == AUTHORITY or not name or "/" in name or name.startswith("."):
        raise InvalidNameError(f"'{name}' can't name a certificate", hint="choose the name of a broker or a user")
    cert_file, key_file = _files(place, name)
    if not replace and (cert_file.exists() or key_file.exists()):
        raise AlreadyExistsError(f"'{cert_file}' or '{key_file}' exists", hint="--replace makes it again")
    authority, authority_key = _authority(place)
    key = _new_key()
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    builder = (
        _builder(_subject(name), authority.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_host_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    certificate = _signed(builder, authority_key)
    _write(key_file, _key_bytes(key), 0o600)
    _write(cert_file, _cert_bytes(certificate), 0o644)
    kind = f"broker certificate for {', '.join(hosts)}" if hosts else "client certificate"
    print_done(
        f"{kind}: {cert_file}, {key_file}",
        {"name": name, "certificate": str(cert_file), "key": str(key_file)},
        as_json=as_json,
    )


@certs.command()
@click.argument("files", nargs=-1, required=True)
@json_option
def show(files: Sequence[str], *, as_json: bool) -> int:
    """Show names, hosts and validity of certificates. The exit code is 1 if one is not valid now.

    Of several files, those that have a key alone are left out, so that certs/*.pem shows a whole folder.
    """
    several = len(files) > 1
    found = [_described(Path(file)) for file in files if not (several and _is_key(Path(file)))]
    if as_json:
        print_json(found)
    else:
        heads = ("file", "name", "authority", "hosts", "valid until", "days left")
        rows = [
            (
                each["file"],
                each["name"],
                each["authority"],
                ", ".join(each["hosts"]) or "-",
                each["until"],
                each["days"],
            )
            for each in found
        ]
        print_table(heads, rows)
    return int(not all(each["valid"] for each in found))


_COLUMNS = ("file", "name", "authority", "hosts", "until", "days")


def _described(file: Path) -> dict[str, Any]:
    certificate = _certificate(file)
    now = _now()
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = [str(each.value) for each in names]
    except x509.ExtensionNotFound:
        hosts = []
    until = certificate.not_valid_after_utc
    return {
        "file": str(file),
        "name": _common_name(certificate.subject),
        "authority": _common_name(certificate.issuer),
        "hosts": hosts,
        "until": until.strftime("%Y-%m-%d"),
        "days": (until - now).days,
        "valid": certificate.not_valid_before_utc <= now < until,
    }


def _now() -> datetime.datetime:
    return datetime.datetime.fromtimestamp(SystemClock().wall_ms() / 1_000, datetime.UTC)


def _files(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.pem", folder / f"{name}-key.pem"


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _subject(name: str) -> x509.Name:
    if not 0 < len(name) <= NAME_CHARS_MAX:
        raise InvalidNameError(f"a certificate's name has 1 to {NAME_CHARS_MAX} characters, not {len(name)}")
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _common_name(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[-1].value) if found else name.rfc4514_string()


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not host or "/" in host or ":" in host or not host.isascii():
        raise InvalidNameError(f"'{host}' is no host", hint="write the name or the IP address, without a port")
    return x509.DNSName(host)


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = _now()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    return builder.sign(key, hashes.SHA256())


def _cert_bytes(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file '{file}'") from error
    except (OSError, ValueError) as error:
        raise InvalidSettingError(f"'{file}' has no certificate: {error}", hint="it is a PEM file") from error


def _is_key(file: Path) -> bool:
    """Say whether a file has a private key, and no certificate."""
    try:
        content = file.read_bytes()
    except OSError:
        return False  # `_certificate` names the fault
    return b"PRIVATE KEY-----" in content and b"BEGIN CERTIFICATE-----" not in content


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    cert_file, key_file = _files(folder, AUTHORITY)
    if not cert_file.exists():
        raise NotFoundError(f"folder '{folder}' has no authority", hint="memq certs init makes one")
    try:
        key = load_pem_private_key(key_file.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidSettingError(f"can't read the key of the authority, '{key_file}': {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidSettingError(f"the key of the authority, '{key_file}', was not made by memq certs")
    return _certificate(cert_file), key


def _write(file: Path, content: bytes, mode: int) -> None:
    """Replace a file as a whole; a reader never meets a part of it."""
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        new.replace(file)
    except OSError as error:
        raise InvalidSettingError(
            f"can't write '{file}': {error.strerror}", hint="check the rights of the folder"
        ) from error

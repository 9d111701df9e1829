"""Settings of broker and command line: a table of names, units, bounds and meanings; their layers.

A flag wins over the environment (`MEMQ_PORT`), that over the settings file, that over the default. The file is
the one of `--config`, else `./memq.toml`, else `memq.toml` in the user's configuration folder; the first that
exists is read, and no other. In a file the keys of `[profile.NAME]` win over the plain ones when that profile is
chosen. Every value keeps its origin.

A part of a cluster that has settings of its own (S3, Kafka, ZooKeeper) keeps them in a section: `[zookeeper]` in the
file, `[profile.NAME.zookeeper]`, or `MEMQ_ZOOKEEPER_…`. They are handed on as they are, and checked by `read_section`
with the part's own table, or passed through to a library that has its own names.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from memq.errors import InvalidSettingError, UnknownSettingError
from memq.kafka_words import KAFKA_ALL, kafka_hint
from memq.limits import KIB, MIB, PARTITIONS_MAX
from memq.redaction import Redacted, shown
from memq.topic import check_name

PREFIX = "MEMQ_"
FILE_NAME = "memq.toml"
# Variables that are not settings: which file, which profile, tracebacks, the compiled kernel, the tests' switch.
OTHER_VARIABLES = ("CONFIG", "PROFILE", "DEBUG", "NATIVE", "REQUIRE_SERVERS")
# Kubernetes sets these in every pod, for each service whose name begins with memq: MEMQ_SERVICE_HOST and
# MEMQ_PORT_9876_TCP_ADDR for `memq`, MEMQ_BROKER_SERVICE_HOST for `memq-broker`.
_SERVICE_LINK = re.compile(r"MEMQ_(.*_)?(SERVICE_(HOST|PORT).*|PORT_\d+_(TCP|UDP|SCTP).*)\Z")

_SIZE_UNITS = {"": 1, "b": 1, "kb": 1_000, "mb": 1_000_000, "gb": 10**9, "tb": 10**12}
_SIZE_UNITS |= {"kib": KIB, "mib": MIB, "gib": 1 << 30, "tib": 1 << 40}
_TIME_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*\Z")
_FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_INT_END = 1 << 52
_UNIX_SECONDS = range(10**9, 10**10)  # 2001 to 2286; in ms January to April 1970

SECTIONS = ("s3", "kafka", "zookeeper", "clients", "source", "tls", "tokens")

Value = str | int | bool
Section = Mapping[str, tuple[object, str]]  # name: (value as it was written, origin)


@dataclass(frozen=True, slots=True)
class Rule:
    """A setting's meaning and permitted values: bounds for numbers, `choices` for words."""

    doc: str
    low: int = 0
    high: int = _INT_END
    choices: tuple[str, ...] = ()


def section_setting(default: Value, doc: str, low: int = 0, high: int = _INT_END, choices: tuple[str, ...] = ()) -> Any:
    """Return a field of a section's dataclass: its default, what it means, and its bounds."""
    return _setting(default, doc, low, high, choices)


def _setting(default: Value, doc: str, low: int = 0, high: int = _INT_END, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"rule": Rule(doc, low, high, choices)})


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Settings of a broker.

    The unit of a number is in its name; a name without one is a count.
    """

    data: str = _setting("memq-data", "folder with all data of memq dev")
    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    insecure: bool = _setting(
        default=False,
        doc="let a broker listen beyond loopback without TLS and an identity of each client",
    )
    port: int = _setting(9876, "port of the memq protocol; 0 for any free one", 0, 65_535)
    http_port: int = _setting(9877, "port of /healthz, /readyz, /metrics; 0 for any free one, -1 for none", -1, 65_535)
    advertise: str = _setting("", "HOST:PORT that clients use; default: the listening address, or the machine's name")
    cluster: str = _setting("memq", "cluster name of a new cluster; first part of every object key")
    broker_id: str = _setting("broker-1", "name of this broker in its cluster")
    zone: str = _setting("", "zone or rack of this broker; a topic is spread over the zones")
    capacity_bytes_s: int = _setting(0, "capacity of this broker per second; 0 for the same as the others")
    governor_strategy: str = _setting(
        "balanced", "assignment of partitions while this broker governs", choices=("balanced", "sticky")
    )
    early_takeover: bool = _setting(
        True, "check reported suspicions, and take partitions over from brokers whose ports refuse connections"
    )
    memory_bytes_max: int = _setting(
        256 * MIB, "budget for blocks in memory; when it is used up, sockets are not read", 32 * MIB, 1 << 44
    )
    connections_max: int = _setting(10_000, "bound on open connections; further ones are refused", 1, 1_000_000)
    connections_per_address_max: int = _setting(
        2_500, "bound on open connections of one address; further ones are refused", 1, 1_000_000
    )
    hello_timeout_ms: int = _setting(10_000, "time after which a connection without HELLO is closed", 100, 600_000)
    frame_timeout_ms: int = _setting(30_000, "time after which a partial frame closes its connection", 100, 3_600_000)
    shared_age_ms_max: int = _setting(
        250, "time that batches of topics with shared_objects wait for each other", 1, 60_000
    )
    spool: str = _setting(
        "", "folder on a disk of this machine, for topics with ack1 = disk; memq dev has one in its data folder"
    )
    spool_bytes_max: int = _setting(
        1 << 30, "size limit of the spool; when it is full, ack=1 is refused", 16 * MIB, 1 << 44
    )
    retention_interval_ms: int = _setting(30_000, "interval between retention runs", 100, 86_400_000)
    sweep_age_ms: int = _setting(3_600_000, "age from which a sweep may delete an object that no pointer names", 1_000)
    sweep_confirm_ms: int = _setting(
        86_400_000, "time between the two sweeps that must both find an object unnamed before it is deleted", 1_000
    )
    staged_age_ms: int = _setting(
        604_800_000, "age at which staged objects without a commit are deleted; a commit may take half of it", 1_000
    )
    delete_objects: bool = _setting(True, "retention and sweep delete objects; off: only memq sweep does")
    auto_create_topics: bool = _setting(True, "create a topic when a producer first sends to it")
    partitions: int = _setting(1, "partitions of a topic that is created without a number", 1, PARTITIONS_MAX)
    transaction_check_interval_ms: int = _setting(
        60_000, "time between two questions to a producer group about an undecided transaction", 100, 3_600_000
    )
    transaction_check_tries: int = _setting(
        15, "questions about an undecided transaction; after them it is parked", 1, 1_000
    )
    permissions: bool = _setting(
        default=False, doc="check the permissions of principals; off: everybody may do everything"
    )
    quotas: bool = _setting(default=False, doc="hold principals to their quotas; off: their rules have no effect")
    superusers: str = _setting("", "principals that may do everything but peer, by commas; a final * names a prefix")
    broker_principals: str = _setting("", "principals of the brokers' certificates, by commas, as superusers")
    audit: bool = _setting(True, "clients report sent and read records to the topic _memq_audit")
    audit_interval_ms: int = _setting(5_000, "interval between the reports of an active client", 50, 60_000)
    audit_partitions: int = _setting(4, "partitions of _memq_audit, used when it is created", 1, PARTITIONS_MAX)
    audit_retention_ms: int = _setting(
        3 * 86_400_000, "retention of reports, used when _memq_audit is created", 600_000
    )
    log_level: str = _setting("info", "lowest level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = _setting("text", "format of the log: text lines or JSON objects", choices=("text", "json"))
    traces: bool = _setting(
        default=False, doc="spans of uploads and publishes to OpenTelemetry's global tracer provider"
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PartSettings(Redacted):
    """The locations of a cluster's parts, each a URL, and the sections with more settings."""

    store: str = _setting("file:memq-data/objects", "location of the objects: file:FOLDER or s3://BUCKET/PREFIX")
    queue: str = _setting("sqlite:memq-data/queue.sqlite", "notification queue: sqlite:FILE or kafka://HOST:PORT,…")
    coordinator: str = _setting(
        "standalone:memq-data/topics.sqlite",
        "topics and owners of partitions: standalone:FILE or zookeeper://HOST:PORT,…/PATH",
    )
    sections: Mapping[str, Section] = field(default_factory=dict)

    def section(self, name: str) -> Section:
        """Return the values of a section; empty if there are none."""
        return self.sections.get(name, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Settings of the command line's producers, consumers and admins."""

    brokers: str = _setting("127.0.0.1:9876", "HOST:PORT of a broker, several with commas")
    acks: Literal["0", "1", "all"] = _setting("all", "condition for an ack", choices=("0", "1", "all"))
    codec: str = _setting("zstd", "compression of blocks", choices=("none", "zstd", "lz4"))
    linger_ms: int = _setting(5, "time that a block waits for more records", 0, 60_000)
    delivery_timeout_ms: int = _setting(120_000, "a record that is not acked by then is given up", 1_000, 86_400_000)
    pending_bytes_max: int = _setting(64 * MIB, "bound on a producer's unacked bytes", 512 * KIB, 1 << 40)
    prefetch_bytes_max: int = _setting(64 * MIB, "bound on the bytes that a consumer reads ahead", 64 * KIB, 1 << 40)
    encryption: str = _setting("", "keys of encrypted records: file:PATH, env:VARIABLE or aws-kms:KEY")
    subjects: str = _setting("", "file with the keys of subjects")
    plain_blocks: Literal["refuse", "allow"] = _setting(
        "refuse", "with encryption, what a consumer does with plain blocks", choices=("refuse", "allow")
    )
    metadata_timeout_ms: int = _setting(10_000, "time that a producer waits for a topic's metadata", 100, 86_400_000)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AuditorSettings(Redacted):
    """Settings of an auditor."""

    audit_state: str = _setting(
        "", "state of an auditor: sqlite:FILE or postgresql://USER@HOST/NAME; memq dev: in its data folder"
    )
    audit_keep_ms: int = _setting(24 * 3_600_000, "retention of an auditor's minutes and closed findings", 600_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardSettings:
    """Where the dashboard listens, and what it allows. Beyond loopback it wants TLS and a token."""

    dashboard_host: str = _setting("127.0.0.1", "address of the dashboard; other than loopback needs TLS and a token")
    dashboard_port: int = _setting(9879, "port of the dashboard; 0 for any free one, -1 for none", -1, 65_535)
    dashboard_tls_cert: str = _setting("", "file with the certificate chain of the dashboard, PEM")
    dashboard_tls_key: str = _setting("", "file with the key of that certificate, PEM")
    dashboard_token_file: str = _setting("", "file with the token that users enter as the password")
    dashboard_acknowledge: bool = _setting(False, "let the dashboard's users acknowledge findings")
    dashboard_contents: bool = _setting(False, "show keys, values and headers of records, which are masked otherwise")


Kind = TypeVar("Kind", BrokerSettings, ClientSettings, AuditorSettings, DashboardSettings)
Chosen = TypeVar("Chosen")


def rules_of(kind: type[Any]) -> dict[str, Rule]:
    """Return the rules of a dataclass of settings, by name."""
    return {part.name: part.metadata["rule"] for part in fields(kind) if "rule" in part.metadata}


def defaults_of(kind: type[Any]) -> dict[str, Value]:
    """Return the defaults of a dataclass of settings, by name."""
    return {
        part.name: part.default  # type: ignore[misc]  # every setting has a default of type Value
        for part in fields(kind)
        if "rule" in part.metadata
    }


OWNERS: tuple[type[Any], ...] = (BrokerSettings, PartSettings, ClientSettings, AuditorSettings, DashboardSettings)
RULES: dict[str, Rule] = {name: rule for owner in OWNERS for name, rule in rules_of(owner).items()}
DEFAULTS: dict[str, Value] = {name: value for owner in OWNERS for name, value in defaults_of(owner).items()}


@dataclass(frozen=True, slots=True, repr=False)
class Settings(Redacted):
    """All settings with their origins: `--port`, `MEMQ_PORT`, `memq.toml`, a profile, `default`."""

    values: Mapping[str, Value]
    origins: Mapping[str, str]
    sections: Mapping[str, Section] = field(default_factory=dict)

    def broker(self) -> BrokerSettings:
        """Return what a broker needs."""
        return self._take(BrokerSettings)

    def parts(self) -> PartSettings:
        """Return where the cluster's parts are."""
        return PartSettings(
            **{name: self.values[name] for name in rules_of(PartSettings)},  # type: ignore[arg-type]
            sections=self.sections,
        )

    def dashboard(self) -> DashboardSettings:
        """Return what the dashboard needs."""
        return self._take(DashboardSettings)

    def client(self) -> ClientSettings:
        """Return what clients need."""
        return self._take(ClientSettings)

    def auditor(self) -> AuditorSettings:
        """Return what an auditor needs."""
        return self._take(AuditorSettings)

    def _take(self, kind: type[Kind]) -> Kind:
        return kind(**{part.name: self.values[part.name] for part in fields(kind)})  # type: ignore[arg-type]


def load_settings(
    flags: Mapping[str, Value | None],
    environment: Mapping[str, str],
    *,
    config: Path | None = None,
    profile: str | None = None,
    folder: Path | None = None,
) -> Settings:
    """Merge the layers; a flag that is None was not given. `folder` may have a `memq.toml`.

    Raises: UnknownSettingError with a "did you mean", InvalidSettingError for values, files and profiles.
    """
    config = config or (Path(environment[PREFIX + "CONFIG"]) if environment.get(PREFIX + "CONFIG") else None)
    profile = profile or environment.get(PREFIX + "PROFILE") or None
    values, origins = dict(DEFAULTS), dict.fromkeys(DEFAULTS, "default")
    sections: dict[str, dict[str, tuple[object, str]]] = {}
    layers = _file_layers(config or _find_file(folder or Path(), environment), profile)
    layers.append(_environment_layer(environment))
    layers.append({name: (value, _flag(name)) for name, value in flags.items() if value is not None})
    for layer in layers:
        for name, (raw, origin) in layer.items():
            section, dot, key = name.partition(".")
            if dot:
                sections.setdefault(section, {})[key] = (raw, origin)
                continue
            values[name] = parse_value(name, raw, origin)
            origins[name] = origin
    return Settings(values, origins, sections)


def read_section(name: str, section: Section, kind: type[Chosen]) -> Chosen:
    """Return the settings of a section as the dataclass `kind` with fields by `section_setting`.

    Raises: UnknownSettingError with a "did you mean", InvalidSettingError.
    """
    rules, defaults = rules_of(kind), defaults_of(kind)
    values: dict[str, Value] = {}
    for key, (raw, origin) in section.items():
        if key not in rules:
            raise UnknownSettingError(
                f"unknown setting '{key}' in [{name}] from {origin}", hint=did_you_mean(key, rules)
            )
        values[key] = _checked(key, raw, f"{origin} [{name}]", rules[key], defaults[key])
    return kind(**values)


def parse_value(name: str, raw: object, origin: str = "here") -> Value:
    """Return the value of setting `name`, checked.

    Sizes as 64MiB, times as 5s, plain numbers in the name's unit.

    Raises: UnknownSettingError, InvalidSettingError.
    """
    if name not in RULES:
        hint = kafka_hint(name) or did_you_mean(name, RULES)
        raise UnknownSettingError(f"unknown setting '{name}' from {origin}", hint=hint)
    return _checked(name, raw, origin, RULES[name], DEFAULTS[name])


def _checked(name: str, raw: object, origin: str, rule: Rule, default: Value) -> Value:
    if isinstance(default, bool):
        return _parse_flag(name, raw, origin)
    if isinstance(default, int):
        return _parse_number(name, raw, origin, rule)
    text = str(raw)
    if not isinstance(raw, str | int) or isinstance(raw, bool):
        text = str(shown(name, text))
        raise InvalidSettingError(f"setting {name} = '{text[:60]}' from {origin} is no text", hint="write it in quotes")
    if any(char < " " or char == "\x7f" for char in text):  # not shown: it may be a secret
        raise InvalidSettingError(
            f"setting {name} from {origin} holds a line break or another control character",
            hint="leave it out; a value read from a file often ends in one",
        )
    if default and not text:  # an empty folder would be this one, an empty host all interfaces
        raise InvalidSettingError(f"setting {name} from {origin} is empty", hint=f"leave it out for '{default}'")
    if rule.choices and text not in rule.choices:
        is_all = name == "acks" and text == "-1"  # in Kafka; the nearest word would be 1
        raise InvalidSettingError(
            f"setting {name} = '{text[:60]}' from {origin} is not one of {', '.join(rule.choices)}",
            hint=KAFKA_ALL if is_all else did_you_mean(text, rule.choices, known=False),
        )
    if name == "advertise" and text and not _is_address(text):
        raise InvalidSettingError(
            f"setting advertise = '{text[:60]}' from {origin} is no HOST:PORT", hint="write it as broker-1:9876"
        )
    if name in ("cluster", "broker_id"):
        check_name(text, name.replace("_id", ""))
    return text


def _is_address(text: str) -> bool:
    return bool(re.fullmatch(r"[^\s/]+:[0-9]{1,5}", text)) and int(text.rpartition(":")[2]) <= 65_535


def parse_size(text: str) -> int | None:
    """Return bytes for `64MiB`, `1.5 GB` or `4096`; None for anything else."""
    return _parse_quantity(text, _SIZE_UNITS)


def parse_time_ms(text: str) -> int | None:
    """Return milliseconds for `5s`, `1.5h`, `250ms`; None for anything else. A plain number needs a unit."""
    return _parse_quantity(text, _TIME_UNITS_MS)


def parse_unix_ms(digits: str) -> int:
    """Return a time in Unix ms. Raises: InvalidSettingError for one that must be meant in seconds."""
    if int(digits) in _UNIX_SECONDS:
        raise InvalidSettingError(
            f"time {digits} is in ms, and in 1970", hint=f"a time in Unix seconds is written {digits}000"
        )
    return int(digits)


def did_you_mean(word: str, names: Mapping[str, object] | tuple[str, ...], *, known: bool = True) -> str:
    """Return `did you mean 'port'?`; when no name is near, the names there are if `known`, else nothing."""
    near = difflib.get_close_matches(word.lower().replace("-", "_"), list(names), n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known are {', '.join(names)}" if known else ""


def _section_hint(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), SECTIONS, n=1, cutoff=0.6)
    if near:
        return f"did you mean '[{near[0]}]'?"
    known = ", ".join(f"[{section}]" for section in (*SECTIONS, "profile.NAME"))
    return f"known are {known}; the settings of brokers and clients have no section"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def config_folder(environment: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Return the user's configuration folder of memq on this platform."""
    home = _home(environment)
    if platform == "win32":
        return Path(environment.get("APPDATA") or home / "AppData/Roaming") / "memq"
    if platform == "darwin":
        return home / "Library/Application Support/memq"
    return Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "memq"


def _home(environment: Mapping[str, str]) -> Path:
    """Return the user's home; `/`, as Docker has it, for a user id without an account."""
    named = environment.get("HOME") or environment.get("USERPROFILE")
    try:
        return Path(named) if named else Path.home()
    except RuntimeError:
        return Path("/")


Layer = dict[str, tuple[object, str]]


def _find_file(folder: Path, environment: Mapping[str, str]) -> Path | None:
    for path in (folder / FILE_NAME, config_folder(environment) / FILE_NAME):
        if path.is_file():
            return path
    return None


def _file_layers(path: Path | None, profile: str | None) -> list[Layer]:
    """Return the file's plain keys and, above them, those of the profile.

    Every profile's keys are checked.
    """
    if path is None:
        if profile:
            raise InvalidSettingError(f"profile '{profile}' needs a settings file", hint=f"write one: ./{FILE_NAME}")
        return []
    table = _read_toml(path)
    profiles = table.pop("profile", {})
    if not isinstance(profiles, dict) or not all(isinstance(part, dict) for part in profiles.values()):
        raise InvalidSettingError(f"'profile' in {path} is not a table", hint="write [profile.NAME]")
    for name, part in (("", table), *profiles.items()):
        for key, (value, origin) in _flat(part, _origin(path, name)).items():
            if isinstance(value, dict) and key not in RULES:
                raise UnknownSettingError(f"unknown section [{key}] in {origin}", hint=_section_hint(key))
            if "." not in key:
                parse_value(key, value, origin)
    if profile and profile not in profiles:
        hint = did_you_mean(profile, profiles) if profiles else f"it has none: write a table [profile.{profile}]"
        raise InvalidSettingError(f"no profile '{profile}' in {path}", hint=hint)
    layers: list[Layer] = [_flat(table, _origin(path, ""))]
    if profile:
        layers.append(_flat(profiles[profile], _origin(path, profile)))
    return layers


def _flat(table: Mapping[str, Any], origin: str) -> Layer:
    """Return a table's settings, those of its sections as `section.name`."""
    layer: Layer = {}
    for key, value in table.items():
        if key in SECTIONS and isinstance(value, dict):
            layer.update({f"{key}.{name}": (inner, origin) for name, inner in value.items()})
        elif key in SECTIONS:
            raise InvalidSettingError(f"'{key}' in {origin} is not a table", hint=f"write [{key}]")
        else:
            layer[key] = (value, origin)
    return layer


def _origin(path: Path, profile: str) -> str:
    return f"{path} [profile.{profile}]" if profile else str(path)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows writes a byte order mark
    except OSError as error:
        hint = "check the path of --config or MEMQ_CONFIG"
        if "=" in str(path):
            hint = "--config names a file; write one setting of a topic as --set KEY=VALUE, another one as its option"
        raise InvalidSettingError(f"can't read settings file {path}: {error.strerror}", hint=hint) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSettingError(
            f"settings file {path} is not TOML: {error}", hint="write each setting as a line: name = value"
        ) from error


def _environment_layer(environment: Mapping[str, str]) -> Layer:
    layer: Layer = {}
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in OTHER_VARIABLES or not environment[variable]:
            continue
        if _SERVICE_LINK.match(variable) or environment[variable].startswith("tcp://"):
            continue
        section, _, key = name.lower().partition("_")
        if section in SECTIONS and key:
            layer[f"{section}.{key}"] = (environment[variable], variable)
            continue
        if name.lower() not in RULES:
            known = [PREFIX + name.upper() for name in RULES]
            sections = difflib.get_close_matches(section, SECTIONS, n=1) if key else []
            known += [f"{PREFIX}{near}_{key}".upper() for near in sections]
            near = difflib.get_close_matches(variable, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "memq config lists the settings"
            hint = kafka_hint(name) or hint
            raise UnknownSettingError(f"unknown variable {variable} in the environment", hint=hint)
        layer[name.lower()] = (environment[variable], variable)
    return layer


def _parse_flag(name: str, raw: object, origin: str) -> bool:
    value = _FLAGS.get(str(raw).strip().lower())
    if value is None:
        raise InvalidSettingError(f"setting {name} = '{raw}' from {origin} is no switch", hint="true or false")
    return value


def _parse_number(name: str, raw: object, origin: str, rule: Rule) -> int:
    text = str(raw).strip()
    value = int(text) if re.fullmatch(r"-?\d{1,18}", text) and not isinstance(raw, bool) else None
    if value is None and "bytes" in name:
        value = parse_size(text)
    elif value is None and name.endswith("_ms"):
        value = parse_time_ms(text)
    if value is None:
        example = "64MiB" if "bytes" in name else "5s" if name.endswith("_ms") else "a whole number"
        raise InvalidSettingError(
            f"setting {name} = '{text[:60]}' from {origin} can't be read", hint=f"write it as {example}"
        )
    if not rule.low <= value <= rule.high:
        bounds = f"{rule.low} to {rule.high}" if rule.high < _INT_END else f"{rule.low} and above"
        raise InvalidSettingError(f"setting {name} = '{text[:60]}' from {origin} is not within {bounds}")
    return value


def _parse_quantity(text: str, units: Mapping[str, int]) -> int | None:
    match = _QUANTITY.match(text)
    unit = units.get(match[2].lower()) if match else None
    if match is None or unit is None or len(match[1]) > 24:
        return None
    value = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
    return int(value) if value == int(value) else None


def environment_settings(flags: Mapping[str, Value | None], config: str | None, profile: str | None) -> Settings:
    """Load the settings of this process: its environment and its working folder."""
    return load_settings(flags, os.environ, config=Path(config) if config else None, profile=profile)

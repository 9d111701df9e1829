"""docs/configuration.md has every setting: `python -m tests.unit.test_docs_configuration` writes it, the test compares.

What a setting means is said once, where it is declared: in the rules of settings, in the comments of the topic's
settings, and in the docstrings of producer and consumer.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from memq import kernel
from memq.broker.identity.networks import TlsSettings
from memq.broker.identity.tokens import TokenSettings
from memq.cli.options import shown_value
from memq.client.consumer.consumer import Consumer
from memq.client.producer.producer import Producer
from memq.governor.zookeeper.settings import ZookeeperSettings
from memq.notification.kafka.settings import OWN, KafkaSettings
from memq.settings import (
    OTHER_VARIABLES,
    AuditorSettings,
    BrokerSettings,
    ClientSettings,
    DashboardSettings,
    PartSettings,
    Rule,
    Value,
    defaults_of,
    rules_of,
)
from memq.storage_handlers.s3.settings import S3Settings
from memq.topic import HOLDS, NEXT_BATCH, TopicSettings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
_PARTS = """Where `memq broker` keeps objects, pointers and assignments. A broker with a default here runs alone, on
`./memq-data`; the event `standalone` names the folder."""
HEAD = """# Configuration

Every setting with its type, unit, default and meaning. This page is generated from the code. The page
[command line](cli.md#settings) describes the order of flags, environment, file and profile. Write a size as `64MiB`, a
time as `5s`; a plain number has the unit given here. `memq config --show-origin` prints the value and origin of each
setting.
"""
BROKER = """\
Settings of `memq broker` and `memq dev`: as a flag `--memory-bytes-max`, in a file `memory_bytes_max`, in the
environment `MEMQ_MEMORY_BYTES_MAX`."""
KAFKA = f"""\
In a file `[kafka]`, in the environment `MEMQ_KAFKA_…`. Other names are passed to librdkafka, from
the file as `"security.protocol" = "SASL_SSL"`, from the environment as `MEMQ_KAFKA_SECURITY_PROTOCOL`. Settings on
which a guarantee depends are refused: {", ".join(f"`{name}`" for name in sorted(OWN))}."""
TOPICS = """`memq topic create NAME --set KEY=VALUE`, `memq topic alter`, or `settings=` of `Admin`. The command line
takes `7d` and `64MiB`; `Admin` takes whole numbers in the unit of the table:
`settings={"retention_ms": 604_800_000}`."""

CLIENTS = """
## Section [clients]

In a file `[clients]`, in the environment `MEMQ_CLIENTS_…`: limits of clients at one broker. The name is a client
id, or `default` for all others. The value is a mode (`off`, `observe`, `soft`, `hard`), then bytes or requests per
second, or both: `loader = "soft 10MiB/s 500/s"`. See [operations](operations.md#limits).
"""
LOW_LATENCY_TEXT = (
    "The defaults are those for low latency; no timer delays a record at a steady rate. These settings matter:"
)
LOW_LATENCY: tuple[tuple[str, str, str], ...] = (
    (
        "`seal_when_idle` of the topic",
        "on: a batch is stored when the one before it is published. Off: at the age `batch_age_ms_max`",
        "a PUT for each batch, as many per second as the store and the queue allow, one at a time",
    ),
    (
        "`linger_ms` of the producer",
        "at most as long as one ack takes. It applies only while another block is unacked",
        "smaller blocks",
    ),
    (
        "`read` of the consumer",
        (
            "auto or broker: a consumer at the end of a log gets the blocks with their pointers, without a "
            "GET. With direct it reads each batch from the store"
        ),
        "CPU and network of the broker, as for READ",
    ),
    (
        "`prefetch_bytes_max` of the consumer",
        "more than the batches that are not yet processed: blocks come with pointers only while there is room",
        "memory",
    ),
    (
        "`memory_bytes_max` of the broker",
        "a sixteenth of it holds answers to POLL of all consumers; without room, pointers come without blocks",
        "memory",
    ),
    (
        "number of partitions",
        "few: each has its own batches",
        "",
    ),
)
TLS = (
    "Certificates of brokers and clients ([TLS](tls.md)). In a file `[tls]`, in the environment `MEMQ_TLS_…`. Python "
    "clients take the variables, or the argument `tls`."
)
TOKENS = "Signed tokens of clients ([TLS](tls.md#tokens)). In a file `[tokens]`, in the environment `MEMQ_TOKENS_…`."
VARIABLES_TEXT = "These variables are not settings: the settings file and flags can't set them."
VARIABLES = {
    "CONFIG": "path of the settings file, as `--config`",
    "PROFILE": "profile of the settings file, as `--profile`",
    "DEBUG": "1: commands show the traceback of an error",
    "NATIVE": "1 (default): all compiled parts of `memq-native` are used, if it is installed; "
    "0: the hot loops run in Python although it is installed; a list of parts "
    "(`broker`, `producer`): only these are compiled; unknown names are logged and ignored. "
    "The first use decides for the whole process. `memq doctor` shows the result",
}
PARTS: tuple[tuple[str, str, type[Any]], ...] = (
    ("Broker", BROKER, BrokerSettings),
    (
        "Parts of a cluster",
        _PARTS,
        PartSettings,
    ),
    ("Section [s3]", "In a file `[s3]`, in the environment `MEMQ_S3_…`.", S3Settings),
    ("Section [kafka]", KAFKA, KafkaSettings),
    ("Section [zookeeper]", "In a file `[zookeeper]`, in the environment `MEMQ_ZOOKEEPER_…`.", ZookeeperSettings),
    ("Section [tls]", TLS, TlsSettings),
    ("Section [tokens]", TOKENS, TokenSettings),
    ("Auditor", "State of `memq auditor` and of the auditor in `memq dev`.", AuditorSettings),
    ("Dashboard", "The dashboard of `memq dev` and `memq auditor`.", DashboardSettings),
    ("Clients of the command line", "`memq produce`, `consume` and the like.", ClientSettings),
)
UNITS = {"_ms": "ms", "_bytes": "bytes", "_bytes_s": "bytes/s", "_requests_s": "requests/s", "_permille": "of 1,000"}
_COMMENT = re.compile(r"^    (\w+): [^#\n]+#\s*(.+)$", re.MULTILINE)
_ARGUMENT = re.compile(r"^    (\w[\w, ]*): (.+)$")


def page() -> str:
    """Return what the page has to say."""
    parts = [HEAD]
    for title, text, kind in PARTS:
        rules, defaults = rules_of(kind), defaults_of(kind)
        rows = (rule_row(name, rule, defaults[name]) for name, rule in rules.items())
        parts.append(section(title, text, ("setting", "type", "unit", "default", "meaning"), rows))
    parts.append(CLIENTS)
    parts.append(
        section(
            "Topics",
            TOPICS,
            ("setting", "type", "unit", "default", "meaning", "altered, it holds"),
            topic_rows(),
        )
    )
    for what, kind in (("Producer", Producer), ("Consumer", Consumer)):
        text = f"Arguments of `memq.{what}` and `memq.aio.{what}`."
        parts.append(section(what, text, ("argument", "default", "meaning"), argument_rows(kind)))
    parts.append(section("Low latency", LOW_LATENCY_TEXT, ("setting", "for low latency", "its cost"), LOW_LATENCY))
    rows = ((f"`MEMQ_{name}`", text) for name, text in VARIABLES.items())
    parts.append(section("Other variables of the environment", VARIABLES_TEXT, ("variable", "meaning"), rows))
    return "".join(parts)


def section(title: str, text: str, heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"\n## {title}\n\n{text}\n\n", line(heads), line(("---",) * len(heads)).replace(" ", "")]
    return "".join(lines + [line(row) for row in rows])


def line(cells: tuple[str, ...]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"


def rule_row(name: str, rule: Rule, default: Value) -> tuple[str, ...]:
    kind = " or ".join(f"`{choice}`" for choice in rule.choices if choice) or kind_of(default)
    return f"`{name}`", kind, unit_of(name), shown(name, default), rule.doc


def topic_rows() -> Iterable[tuple[str, ...]]:
    said = dict(_COMMENT.findall(inspect.getsource(TopicSettings)))
    for name in TopicSettings.__struct_fields__:
        assert name in said, f"say in memq/topic.py, in a comment after it, what the setting {name} means"
        default = getattr(TopicSettings(), name)
        holds = HOLDS.get(name, NEXT_BATCH)
        yield f"`{name}`", kind_of(default), unit_of(name), shown(name, default), said[name], holds


def argument_rows(kind: type[Any]) -> Iterable[tuple[str, ...]]:
    said = arguments_of(inspect.cleandoc(kind.__doc__ or ""))
    for name, argument in inspect.signature(kind).parameters.items():
        assert name in said, f"say in the docstring of {kind.__name__} what {name} means"
        default = argument.default
        if default is inspect.Parameter.empty:
            yield f"`{name}`", "", said[name]
        else:
            yield f"`{name}`", shown(name, default) if default is not None else "none", said[name]


def arguments_of(doc: str) -> Mapping[str, str]:
    """Return what a docstring says under `Args:`, by argument."""
    found: dict[str, str] = {}
    names: list[str] = []
    for text in doc.partition("Args:\n")[2].partition("\n\n")[0].splitlines():
        begin = _ARGUMENT.match(text)
        if begin is not None:
            names = begin[1].split(", ")
            found |= dict.fromkeys(names, begin[2])
        else:
            found |= {name: f"{found[name]} {text.strip()}" for name in names}
    return found


def kind_of(default: Value) -> str:
    return {bool: "flag", int: "number", str: "text"}[type(default)]


def unit_of(name: str) -> str:
    bare = re.sub(r"_(min|max)$", "", name)
    return next((unit for end, unit in UNITS.items() if bare.endswith(end)), "")


def shown(name: str, default: Value) -> str:
    return shown_value(name, default).replace("0MiB", "0") if default == 0 else shown_value(name, default)


def test_the_page_has_every_setting() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: python -m tests.unit.test_docs_configuration"


def test_the_page_has_every_other_variable_of_a_user() -> None:
    assert set(VARIABLES) == set(OTHER_VARIABLES) - {"REQUIRE_SERVERS"}  # a switch of memq's own tests
    assert all(f"`{part}`" in VARIABLES["NATIVE"] for part in kernel.PARTS)


def test_every_setting_says_what_it_means_and_in_which_unit() -> None:
    for _, _, kind in PARTS:
        for name, rule in rules_of(kind).items():
            assert rule.doc, name
    numbers = [row for row in topic_rows() if row[1] == "number" and not row[2]]
    counts = ["batch_blocks_max", "uploads_in_flight_max", "ring_slots", "write_partitions_max"]
    assert [row[0] for row in numbers] == [f"`{name}`" for name in counts]


if __name__ == "__main__":
    sys.exit(PAGE.write_text(page(), encoding="utf-8") == 0)

"""The options of a write with `format("memq")`, and the columns that it takes. Pure.

Names are case-insensitive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memq.errors import InvalidSettingError
from memq.format.blocks.header import CODECS
from memq.limits import BATCH_ID_END
from memq.settings import did_you_mean
from memq.spark.options import read_choice, read_given
from memq.topic import check_name

WRITE_DESCRIPTIONS = {
    "brokers": "HOST:PORT of a broker, several with commas; else MEMQ_BROKERS",
    "store": "file:FOLDER or s3://BUCKET/PREFIX?endpoint=…: where tasks stage, instead of what brokers say",
    "config": "settings file on every machine, for the section [s3]; else as `memq` finds it",
    "profile": "profile of the settings file",
    "topic": "where records go that have no column topic",
    "mode": "exactly-once: tasks stage, a commit makes a batch visible; or low-latency: straight to the brokers",
    "writer": "name of the writer; a stream needs one, and a new one for each new checkpoint",
    "batchid": "number of a batch job, which grows; with writer: the job that runs again is there once",
    "codec": "zstd, lz4 or none",
}
WRITE_SPELLING = {name: name for name in WRITE_DESCRIPTIONS} | {"batchid": "batchId"}
MODES = ("exactly-once", "low-latency")
_CODECS = ("zstd", *(name for name in CODECS if name != "zstd"))  # the first is what nobody chose
_SPARKS_OWN = ("path", "checkpointlocation")
_TEXT = ("binary", "string")
WRITE_COLUMNS: dict[str, tuple[str, ...]] = {
    "value": _TEXT,
    "key": _TEXT,
    "headers": ("array<struct<name:string,value:binary>>",),
    "tag": ("string",),
    "timestamp": ("timestamp",),
    "topic": ("string",),
    "partition": ("int",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options of a write.

    `batch_id` is -1 where none was given.
    """

    brokers: str | None = None
    store: str = ""
    config: str | None = None
    profile: str | None = None
    topic: str = ""
    staged: bool = True
    writer: str = ""
    batch_id: int = -1
    codec: str = "zstd"


def write_options(given: Mapping[str, str], *, streams: bool) -> WriteOptions:
    """Read the options of a write. Raises: UnknownSettingError, InvalidSettingError, InvalidNameError."""
    normalized = read_given(given, WRITE_SPELLING, _SPARKS_OWN)
    writer, batch = normalized.get("writer", ""), normalized.get("batchid", "")
    if streams and (not writer or batch):
        raise InvalidSettingError(
            "a stream needs the option 'writer', and no 'batchId'", hint="writer = a name that its checkpoint keeps"
        )
    if not streams and bool(writer) != bool(batch):
        raise InvalidSettingError("options 'writer' and 'batchId' require each other", hint="give both, or none")
    if batch and not (batch.isdecimal() and int(batch) < BATCH_ID_END):
        raise InvalidSettingError(f"option 'batchId' = '{batch[:60]}' is no number below {BATCH_ID_END}")
    return WriteOptions(
        brokers=normalized.get("brokers") or None,
        store=normalized.get("store", ""),
        config=normalized.get("config") or None,
        profile=normalized.get("profile") or None,
        topic=check_name(normalized["topic"]) if normalized.get("topic") else "",
        staged=read_choice(normalized, "mode", "mode", MODES) == MODES[0],
        writer=check_name(writer, "writer") if writer else "",
        batch_id=int(batch) if batch else -1,
        codec=read_choice(normalized, "codec", "codec", _CODECS),
    )


def check_columns(columns: Mapping[str, str], options: WriteOptions) -> None:
    """Check the names and types (as Spark's simple strings) of what is written.

    Raises: InvalidSettingError.
    """
    for name, kind in columns.items():
        allowed = WRITE_COLUMNS.get(name.lower())
        if allowed is None:
            raise InvalidSettingError(
                f"column '{name[:60]}' is none that a record has",
                hint=did_you_mean(name, tuple(WRITE_COLUMNS), known=False) or f"select {', '.join(WRITE_COLUMNS)}",
            )
        if kind not in allowed:
            raise InvalidSettingError(f"column '{name}' is {kind}, not {' or '.join(allowed)}", hint="cast it")
    names = {name.lower() for name in columns}
    if "value" not in names:
        raise InvalidSettingError("there is no column value", hint="select to_json(struct(*)) as value, for example")
    if ("topic" in names) == bool(options.topic):
        raise InvalidSettingError("one of the option 'topic' and the column topic is needed", hint="topic = clicks")

"""docs/pipelines.md: every command and snippet runs in order, and every option of a pipeline is used."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
from click.testing import CliRunner
from pyspark.sql import SparkSession

import memq
from memq.spark.pipelines.__main__ import PIPELINES, pipelines
from tests.servers import DevServer
from tests.spark.produced import produce

PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"
COMMAND = "python -m memq.spark.pipelines "


def snippets() -> list[tuple[str, str]]:
    """Return the language and the text of each snippet."""
    return re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_every_option_is_in_a_command() -> None:
    lines = [line for language, text in snippets() if language == "sh" for line in text.splitlines()]
    shown = [shlex.split(line.removeprefix(COMMAND)) for line in lines]
    for name in PIPELINES:
        command = pipelines.get_command(click.Context(pipelines), name)
        assert command is not None
        used = {word for words in shown if words[0] == name for word in words}
        options = [param for param in command.params if isinstance(param, click.Option)]
        missing = [option.name for option in options if not used & {*option.opts} and option.name != "given"]
        assert not missing, f"{name}: {missing}"


def test_every_snippet_runs(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    produce(broker, "clicks-of-docs", range(200))
    with memq.Admin(broker.address) as admin:
        for topic in ("clicks-audit", "clicks-again"):
            admin.create_topic(topic, partitions=2)
    real = {"127.0.0.1:9876": broker.address, "/srv/out": str(tmp_path), "clicks ": "clicks-of-docs "}
    real |= {'"clicks"': '"clicks-of-docs"'}
    names: dict[str, object] = {"spark": spark}
    for language, snippet in snippets():
        text = snippet
        for shown, meant in real.items():
            text = text.replace(shown, meant)
        if language == "python":
            exec(compile(text, str(PAGE), "exec"), names)
            continue
        for line in text.splitlines():
            if line.startswith(COMMAND):
                words = shlex.split(line.removeprefix(COMMAND))
                done = CliRunner().invoke(pipelines, words, standalone_mode=False, catch_exceptions=False)
                assert done.return_value == 0, done.output
    assert names["records"] == 200
    assert names["lengths"] == [200]

"""The pipelines' command line: one file per pipeline, imported when it is called."""

from __future__ import annotations

import importlib
import re
import sys

import click

from memq.errors import MemqError

PIPELINES = {  # name: file, and what it does; spark-submit puts this folder before the standard library: no name of it
    "audit": ("audit", "report lost, doubled and damaged records, as `memq audit` does"),
    "backfill": (
        "backfill",
        "write what a group has not read to Parquet files, in parallel, and commit it",
    ),
    "compact": ("compact", "write a topic as Parquet files by date and hour"),
    "replay": ("replay", "send a range of a topic to another topic, or write it to files, once"),
    "profile": ("topic_profile", "show record sizes and the distribution of keys, and guess the schema of JSON values"),
}


INTERRUPTED = 130  # exit code that a shell reports for a program that SIGINT ended
_EXTRA = frozenset(("numpy", "pandas", "py4j", "pyarrow", "pyspark"))
_OURS = re.compile(r"^memq\.errors\.\w+: (?P<text>.*)(?:\nhint: (?P<hint>.*))?$", re.MULTILINE)
_SPARKS = re.compile(r"^\[(?P<condition>[A-Z_.]+)\] .*", re.MULTILINE)


class _Pipelines(click.Group):
    """Finds a pipeline by the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(PIPELINES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in PIPELINES:
            return None
        found = importlib.import_module(f"memq.spark.pipelines.{PIPELINES[cmd_name][0]}").command
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Pipelines"):
            formatter.write_dl([(name, summary) for name, (_, summary) in PIPELINES.items()])


@click.command(cls=_Pipelines)
def pipelines() -> None:
    """Run a pipeline on Spark. Each reads straight from the store, and can be killed and run again."""


def main() -> int:
    """Run what the arguments say, and return the exit code."""
    try:
        code = pipelines.main(prog_name="memq.spark.pipelines", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        _print_error("interrupted: nothing is lost, the next run continues")
        return INTERRUPTED
    except MemqError as error:
        _print_error(str(error), error.hint)
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        _print_error(f"pipelines need {package}, which is not installed", "pip install 'memq[spark]'")
        return 2
    except Exception as error:
        summary = sentence_of(str(error))
        if summary is None:
            raise
        _print_error(*summary)
        return 1
    return code if isinstance(code, int) else 0


def sentence_of(text: str) -> tuple[str, str] | None:
    """Return the message and the hint of an error of Spark, without traces; None for another error.

    A task's error comes back as text, with the traces of Python and of Java around memq's message.
    """
    ours = list(_OURS.finditer(text))
    if ours:
        return ours[-1]["text"], ours[-1]["hint"] or ""
    sparks = _SPARKS.search(text)
    if sparks is None:
        return None
    java = sparks["condition"] == "JAVA_GATEWAY_EXITED"
    return sparks[0], "Spark needs Java 17 or later: install it, or set JAVA_HOME to its folder" if java else ""


def _print_error(text: str, hint: str = "") -> None:
    click.echo(f"memq.spark.pipelines: {text}" + (f" ({hint})" if hint else ""), err=True)


if __name__ == "__main__":
    sys.exit(main())

"""The pipelines' command line: one file per pipeline, imported when it is called."""

from __future__ import annotations

import importlib
import sys

import click

from memq.errors import MemqError

PIPELINES = {  # name: file, and what it does
    "audit": ("audit", "say what was lost, doubled or damaged, as `memq audit` does"),
    "backfill": ("backfill", "catch a group up in parallel, to Parquet files, and commit it"),
    "compact": ("compact", "write a topic as Parquet files by date and hour"),
    "replay": ("replay", "send a range of a topic to another topic, or write it to files, once"),
    "profile": ("profiles", "say how large records are, how keys are spread, and guess the schema of JSON values"),
}


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
            formatter.write_dl([(name, told) for name, (_, told) in PIPELINES.items()])


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
    except MemqError as error:
        hint = f" ({error.hint})" if error.hint else ""
        click.echo(f"memq.spark.pipelines: {error}{hint}", err=True)
        return 1
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())

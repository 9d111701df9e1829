"""The command line: the file of a command is imported only when it is called.

`memq --help` is answered from the table of commands, before click is imported: click alone takes three times as long
to import as a bare interpreter takes to start.
"""

from __future__ import annotations

import os
import sys

from memq import __version__
from memq.cli.commands import COMPLETE_VARIABLE, INTERRUPTED, help_text


def _say(text: str) -> int:
    """Print and return the exit code; a reader that has gone is no fault."""
    try:
        print(text, flush=True)
    except OSError as error:
        from memq.cli.run import report_output

        return report_output(error)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Without `arguments` it takes those of the process, and where librdkafka was loaded it ends the process itself.
    """
    if arguments is None:
        return _main_of_process(sys.argv[1:])
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # who started us has closed it
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it stays open to the end
    if COMPLETE_VARIABLE not in os.environ:
        if arguments in (["--help"], ["-h"], ["help"]):
            return _say(help_text())
        if arguments in (["--version"], ["version"]):
            return _say(f"memq {__version__}")
    try:
        from memq.cli.run import run

        return run(arguments)
    except KeyboardInterrupt:  # half of a start is import
        return INTERRUPTED


def _main_of_process(arguments: list[str]) -> int:
    """Run the command of this process.

    Librdkafka's destructors may wait for ever: the process ends without them.
    """
    try:
        from memq.runtime.process import end_process, own_process
    except KeyboardInterrupt:  # it imports asyncio: a third of a start
        return INTERRUPTED
    own_process()
    code = main(arguments)
    if "confluent_kafka" in sys.modules:
        end_process(code)
    return code

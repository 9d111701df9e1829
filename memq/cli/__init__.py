"""The command line: the file of a command is imported only when it is called.

`memq --help` reads the table of commands, without an import of click. The import of click alone takes three times as
long as the start of a bare interpreter.
"""

from __future__ import annotations

import os
import sys

from memq import __version__
from memq.cli.commands import COMPLETE_VARIABLE, INTERRUPTED, help_text


def _print(text: str) -> int:
    """Print, and return the exit code; a reader that has closed the pipe is no fault."""
    try:
        print(text, flush=True)
    except OSError as error:
        from memq.cli.run import report_output

        return report_output(error)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Without `arguments` it uses those of the process, and ends the process itself if librdkafka was loaded.
    """
    if arguments is None:
        return _main_of_process(sys.argv[1:])
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it stays open to the end
    if COMPLETE_VARIABLE not in os.environ:
        if arguments in (["--help"], ["-h"], ["help"]):
            return _print(help_text())
        if arguments in (["--version"], ["-V"], ["version"]):
            return _print(f"memq {__version__}")
        if arguments[:1] == ["help"]:
            arguments = [*arguments[1:], "--help"]
    try:
        from memq.cli.run import run

        return run(arguments)
    except KeyboardInterrupt:  # imports take half of the start
        return INTERRUPTED


def _main_of_process(arguments: list[str]) -> int:
    """Run the command of this process.

    Librdkafka's destructors may wait without end, so the process ends without them.
    """
    try:
        from memq.runtime.process import end_process, own_process
    except KeyboardInterrupt:  # the import of asyncio takes a third of the start
        return INTERRUPTED
    own_process()
    code = main(arguments)
    if "confluent_kafka" in sys.modules:
        end_process(code)
    return code

"""Runs a command: finds it in the table; every failure becomes one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
import traceback

import click
from click.shell_completion import CompletionItem, shell_complete

from memq.cli.commands import COMMANDS, COMPLETE_VARIABLE, INTERRUPTED, PIPE_CLOSED, help_text
from memq.cli.output import one_line, print_message, print_waits
from memq.errors import (
    AuditStateError,
    DeniedError,
    InvalidFilterError,
    InvalidNameError,
    InvalidSettingError,
    MemqError,
    NotFoundError,
    QueueError,
    StoreError,
    TimedOutError,
    UnknownSettingError,
    UnreachableError,
)
from memq.kafka_words import KCAT_MODES, kafka_hint
from memq.redaction import redacted
from memq.settings import Settings, did_you_mean

OK, FAILED, USAGE, NOT_FOUND, DENIED, UNREACHABLE, TIMED_OUT = range(7)

# The first class that fits decides.
EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (NotFoundError, NOT_FOUND),
    (FileNotFoundError, NOT_FOUND),
    (DeniedError, DENIED),
    (PermissionError, DENIED),
    (IsADirectoryError, USAGE),
    (UnreachableError, UNREACHABLE),
    (StoreError, UNREACHABLE),
    (QueueError, UNREACHABLE),
    (AuditStateError, UNREACHABLE),
    (ConnectionError, UNREACHABLE),
    (TimedOutError, TIMED_OUT),
    (TimeoutError, TIMED_OUT),
    (InvalidFilterError, USAGE),
    (InvalidNameError, USAGE),
    (InvalidSettingError, USAGE),
    (UnknownSettingError, USAGE),
    (click.UsageError, USAGE),
)

_OS_HINTS = {
    errno.ENOENT: "check the path",
    errno.EISDIR: "name a file, not a folder",
    errno.EACCES: "give this user the right to open it",
    errno.ENOSPC: "make room on the disk that the output goes to, and run the command again",
}

# The ends of messages of click, and of `did_you_mean`, about an unknown word.
_KNOWN = re.compile(r"\.? \(?((?:did you mean|known are) .+?)\)?$", re.IGNORECASE)


class LazyGroup(click.Group):
    """Knows the commands by the table alone; a command's module is imported when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def get_help(self, ctx: click.Context) -> str:
        """Return the text that `memq --help` prints without click."""
        return help_text()

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command's name without importing the commands."""
        found = [(name, text) for name, (_, _, text) in COMMANDS.items() if name.startswith(incomplete)]
        return [CompletionItem(name, help=text) for name, text in found]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; an unknown name gets a "did you mean"."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"no command '{args[0]}' ({did_you_mean(args[0], tuple(COMMANDS))})")
        return super().resolve_command(ctx, args)


program = LazyGroup("memq", context_settings={"help_option_names": ["-h", "--help"]})


def run(arguments: list[str]) -> int:
    """Run `memq ARGUMENTS…` and return the exit code; a traceback is shown only when MEMQ_DEBUG is set."""
    if COMPLETE_VARIABLE in os.environ:
        return shell_complete(program, {}, "memq", COMPLETE_VARIABLE, os.environ[COMPLETE_VARIABLE])
    print_waits()
    try:
        # Not `program.main`, which converts a closed pipe to exit code 1.
        with program.make_context("memq", arguments) as context:
            result = _invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else OK
    except click.exceptions.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError as error:
        return report_output(error)
    except click.exceptions.NoArgsIsHelpError as error:
        print_message(error.format_message())
        return USAGE
    except Exception as error:  # noqa: BLE001  # the last stop: whatever it is becomes one line
        return _report(error)


def _invoke(context: click.Context) -> object:
    """Run the command; the error about a topic or group that does not exist names the nearest one."""
    try:
        return program.invoke(context)
    except NotFoundError as error:
        if isinstance(context.obj, Settings):
            from memq.cli.near_names import name_nearest

            name_nearest(error, context.obj.client().brokers)
        raise


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an error."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), FAILED)


def report_output(error: OSError) -> int:
    """Report that stdout takes no more, unless its reader has closed the pipe.

    Stdout is then replaced, so that the interpreter's flush at exit has no effect.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED if isinstance(error, BrokenPipeError) else _report(error)


def _report(error: Exception) -> int:
    if os.environ.get("MEMQ_DEBUG"):
        print_message(redacted("".join(traceback.format_exception(error))).rstrip())
    text, hint = _describe(error)
    text = one_line(redacted(text))
    print_message(f"{_error_word()} {text}" + (f" ({one_line(redacted(hint))})" if hint else ""))
    return exit_code_of(error)


def _error_word() -> str:
    plain = "memq: error:"
    if "NO_COLOR" in os.environ or not sys.stderr.isatty():
        return plain
    return click.style(plain, fg="red", bold=True)


def _describe(error: Exception) -> tuple[str, str]:
    """Return the fault and the hint."""
    if isinstance(error, MemqError):
        return str(error), error.hint
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "memq"
        text, known = error.format_message().rstrip("."), f"see {command} --help"
        text = re.sub("is not a valid integer( range)?", "is not a whole number", text)
        if isinstance(error, click.NoSuchOption):
            known = _other_word(error.option_name, command) or _own_word(error.option_name, error.ctx) or known
        if found := _KNOWN.search(text):
            text, known = text[: found.start()], found[1]
        if isinstance(error, click.NoSuchOption) and "--set" in _options_of(error.ctx):
            known = _topic_setting(error.option_name) or kafka_hint(error.option_name) or known
        return text[:1].lower() + text[1:], known[:1].lower() + known[1:]
    if isinstance(error, click.ClickException):
        return error.format_message(), ""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        text = f"{where}{error.strerror}" if where else f"{error.strerror or error}".lower()
        return text, _OS_HINTS.get(error.errno or 0, "")
    if isinstance(error, UnicodeError):
        return f"input is not UTF-8: {error}", "values of any bytes go through --input json as value_base64"
    return f"internal error: {type(error).__name__}: {error}", "this is a fault of memq: MEMQ_DEBUG=1 shows where"


def _topic_setting(option: str) -> str:
    """Return the hint for a setting of a topic that was written as an option; "" for others."""
    from memq.topic import TopicSettings

    name = option.strip("-").replace("-", "_")
    return f"write it as --set {name}=VALUE" if name in TopicSettings.__struct_fields__ else ""


def _own_word(option: str, context: click.Context | None) -> str:
    """Return the hint for a command written as an option, or for a letter near another; "" for others."""
    if context is not None and isinstance(context.command, click.Group):
        name = option.strip("-")
        return f"that is a command: {context.command_path} {name}" if name in context.command.commands else ""
    options = _options_of(context)
    letter = option.strip("-")
    if len(letter) == 1:
        other_case = f"-{letter.swapcase()}"
        near = [other_case] if other_case in options else [each for each in options if each.startswith(f"--{letter}")]
        return f"did you mean {' or '.join(near)}?" if near else ""
    return ""


def _options_of(context: click.Context | None) -> list[str]:
    return [] if context is None else [option for each in context.command.params for option in each.opts]


def _other_word(option: str, command: str) -> str:
    """Return the hint for an option of kcat or Kafka, or for one before the command; "" for others."""
    if command == "memq" and option in KCAT_MODES:
        return f"that is a command: {KCAT_MODES[option]}"
    before = f"options follow the command: memq COMMAND {option} …" if command == "memq" else ""
    return kafka_hint(option) or before

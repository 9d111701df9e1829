"""`memq broker`: one broker of a cluster, until a signal; `memq broker drain` empties one."""

from __future__ import annotations

import asyncio
import sys

import click

from memq.cli.log_lines import log_to_stderr
from memq.cli.options import setting_options, settings_of
from memq.cli.ready import say_ready
from memq.errors import InvalidRequestError
from memq.settings import BrokerSettings, PartSettings, Value, rules_of

_NAMES = [name for name in rules_of(BrokerSettings) if name != "data"] + list(rules_of(PartSettings))


@click.group(invoke_without_command=True)
@setting_options(*_NAMES)
@click.pass_context
def broker(context: click.Context, /, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Run a broker of a cluster, on the store, queue and coordinator of the settings.

    Prints `memq ready: HOST:PORT` on stdout when clients can connect. SIGTERM and Ctrl-C drain: the partitions are
    handed over to other brokers, what is held is stored and acked; a second one gives up and says what was held.
    """
    if context.invoked_subcommand is not None:
        return 0
    if sys.platform == "win32":
        raise InvalidRequestError("the broker does not run on Windows", hint="run it on Linux, macOS or WSL")
    settings = settings_of(config, profile, **flags)
    log_to_stderr(settings.broker().log_level, settings.broker().log_format)
    import uvloop

    from memq.broker.assembly import serve_cluster
    from memq.broker.process import calm_collector

    calm_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve_cluster(settings.broker(), settings.parts(), say_ready))

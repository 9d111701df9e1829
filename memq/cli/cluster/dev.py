"""`memq dev`: everything in one process, on one folder, until a signal."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from memq.cli.option_groups import GroupedCommand
from memq.cli.options import setting_options, settings_of
from memq.cli.output import log_to_stderr, print_ready
from memq.errors import InvalidRequestError
from memq.settings import AuditorSettings, BrokerSettings, DashboardSettings, Value, rules_of


@click.command(cls=GroupedCommand)
@setting_options(*rules_of(BrokerSettings), *rules_of(AuditorSettings), *rules_of(DashboardSettings))
def dev(config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Run broker, store, queue and, unless `--no-audit` is given, an auditor in one process.

    Prints `memq ready: HOST:PORT` on stdout when clients can connect. The log has the address of the dashboard, which
    needs the extra [dashboard]. SIGTERM and Ctrl-C drain: the broker refuses new blocks, stores and acks those that it
    holds, and exits. A second signal ends the drain, and the log names the batches that were not published.
    """
    if sys.platform == "win32":
        raise InvalidRequestError("the broker does not run on Windows", hint="run it on Linux, macOS or WSL")
    loaded = settings_of(config, profile, **flags)
    settings = loaded.broker()
    log_to_stderr(settings.log_level, settings.log_format)
    import uvloop

    from memq.broker.assembly import check_sections
    from memq.broker.dev import serve
    from memq.broker.ingest.quotas import client_limits
    from memq.broker.process import calm_collector
    from memq.cli.cluster.embedded_services import EmbeddedService, embedded_auditor, embedded_dashboard, embedded_state

    check_sections(loaded.parts())
    sections = loaded.parts().sections
    limits = client_limits(loaded.parts().section("clients"))
    services: list[EmbeddedService] = []
    open_state = embedded_state(loaded.auditor(), Path(settings.data)) if settings.audit else None
    if open_state is not None:
        services.append(embedded_auditor(open_state, loaded.auditor().audit_keep_ms))
    dashboard = embedded_dashboard(loaded, open_state)
    if dashboard is not None:
        services.append(dashboard)

    async def companion(address: str) -> None:
        await asyncio.gather(*(run(address) for run in services))

    calm_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(settings, print_ready, client_limits=limits, companion=companion, sections=sections))

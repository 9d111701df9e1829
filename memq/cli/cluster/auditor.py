"""`memq auditor`: audits all topics continuously, and stores its findings.

Its subcommands show the findings, and record acknowledgements.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

import click

from memq.audit.finding import EVIDENCE_MAX, Finding, csv_of
from memq.audit.live.service import keep_auditing
from memq.audit.live.storage.database import Database
from memq.audit.live.storage.store import AuditStore
from memq.audit.live.verification import verify_finding
from memq.audit.live.view import AuditView, TopicSummary, doubted, latencies
from memq.audit.minutes import MINUTE_MS, QUANTILES, QUEUE, percentile_name
from memq.cli.cluster.embedded_services import (
    EmbeddedService,
    OpenState,
    embedded_dashboard,
    state_of,
    state_setting,
    written_state,
)
from memq.cli.options import json_option, listen_address, setting_options, settings_of
from memq.cli.output import log_to_stderr, print_done, print_json, print_message, print_ready, print_table, time_text
from memq.cli.run import FAILED, OK
from memq.errors import NotFoundError
from memq.runtime.runtime import Runtime
from memq.settings import AuditorSettings, DashboardSettings, Settings, Value, rules_of

Answer = TypeVar("Answer")
METRICS_PORT = 9880
MINUTES_END = 1 << 40
_SHOWN = (
    *("topic", "group", "verdict", "records", "lost", "doubled", "corrupt", "in flight"),
    *(f"{percentile_name(each)} ms" for each in QUANTILES),
)


@click.group(invoke_without_command=True)
@setting_options("brokers", *rules_of(AuditorSettings), *rules_of(DashboardSettings), "log_level", "log_format")
@click.pass_context
def auditor(context: click.Context, /, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Audit all topics of a cluster whose setting audit is on, until a signal, and keep the findings.

    Several auditors with one state in PostgreSQL share the work; an auditor with its own state, like
    the one in `memq dev`, reads everything itself. Prints `memq auditing: ADDR` on stdout after the first round. The
    log has the address of the dashboard, which needs the extra [dashboard].
    """
    if context.invoked_subcommand is not None:
        return OK
    settings = settings_of(config, profile, **flags)
    log_to_stderr(settings.broker().log_level, settings.broker().log_format)
    open_state = state_of(settings.auditor())
    dashboard = embedded_dashboard(settings, open_state)
    with asyncio.Runner() as runner:
        return runner.run(_serve(settings.client().brokers, open_state(), settings.auditor().audit_keep_ms, dashboard))


@auditor.command("show", short_help="Show each topic's verdict, with its groups.")
@setting_options(*rules_of(AuditorSettings))
@click.option("--minutes", type=click.IntRange(1), default=60, metavar="N", help="Minutes up to now (default 60).")
@json_option
def show(minutes: int, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Show each topic's verdict, with its groups, over the last minutes.

    Exits with 1 when something is wrong, or when the audit is behind: no auditor has read the reports of clients for a
    minute. No verdict is then ok.
    The last columns are the p50, p90 and p99 latencies, in ms from event time, until records were acked, or processed
    by the group. Delayed records that are not due are in flight; they are shown apart.
    """
    now_ms = Runtime().clock.wall_ms()
    now = now_ms // MINUTE_MS

    async def ask(view: AuditView, _: AuditStore) -> tuple[list[TopicSummary], dict[str, int], str]:
        ahead = {each.topic_id: each.row.in_flight(QUEUE) for each in await view.topics(now + 1, MINUTES_END)}
        return await view.topics(now - minutes, now + 1), ahead, await view.behind(now_ms)

    found, ahead, behind = _asked(settings_of(config, profile, **flags), ask)
    if as_json:
        print_json([_summary_json(summary, behind) | {"not_due": ahead[summary.topic_id]} for summary in found])
    else:
        rows = [
            (each.topic, name or "(queue)", *_row_of(each, name, behind)) for each in found for name in _sides(each)
        ]
        print_table(_SHOWN, rows)
        for each in found:
            if waiting := ahead[each.topic_id]:
                print_message(f"topic '{each.topic}': {waiting:,} delayed records are in flight until they are due")
    if behind:
        print_message(f"memq: {behind}")
    return FAILED if behind or any(summary.findings for summary in found) else OK


@auditor.command("findings", short_help="List findings of all topics, or of TOPIC.")
@setting_options(*rules_of(AuditorSettings))
@click.argument("topic", default="")
@click.option("--all", "all_", is_flag=True, help="Also closed and unproven findings.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, as evidence for other programs.")
@json_option
def findings(
    topic: str,
    all_: bool,
    as_csv: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> int:
    """List findings of all topics, or of TOPIC, with the sequences of each.

    Exits with 1 when there are any, and with 3 when no auditor has seen TOPIC.
    """

    async def ask(view: AuditView, _: AuditStore) -> list[Finding]:
        found = await view.findings(topic, all_=all_, limit=EVIDENCE_MAX)
        if topic and not found and not await view.has(topic):
            raise NotFoundError(
                f"no auditor has seen records of topic '{topic[:60]}'", hint="memq auditor show lists the topics"
            )
        return found

    found = _asked(settings_of(config, profile, **flags), ask)
    if as_csv:
        click.echo(csv_of(found), nl=False)
    elif as_json:
        print_json([finding.to_json() for finding in found])
    else:
        print_table(("id", "minute", "finding"), [(each.id, _minute_text(each), str(each)) for each in found])
    return FAILED if any(finding.grave and not finding.resolved_ms for finding in found) else OK


@auditor.command("acknowledge")
@setting_options(*rules_of(AuditorSettings))
@click.argument("finding")
@click.option("--by", "who", required=True, metavar="NAME", help='Your name; "" removes the acknowledgement.')
@json_option
def acknowledge(
    finding: str, who: str, as_json: bool, config: str | None, profile: str | None, **flags: Value | None
) -> int:
    """Acknowledge FINDING, an id of the list."""
    now_ms = Runtime().clock.wall_ms()
    settings = settings_of(config, profile, **flags)
    _asked(settings, lambda _, store: store.acknowledge(finding, who, now_ms))
    text = f"finding {finding} is acknowledged by {who}" if who else f"finding {finding} is not acknowledged any more"
    print_done(text, {"finding": finding, "by": who}, as_json=as_json)
    return OK


@auditor.command("metrics", short_help="Serve findings as metrics for Prometheus.")
@setting_options(*rules_of(AuditorSettings), "log_level", "log_format")
@click.option(
    "--serve",
    metavar="HOST:PORT",
    default=f"127.0.0.1:{METRICS_PORT}",
    help="Address to listen on; port 0 takes any free port.",
    show_default=True,
)
def metrics(serve: str, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Serve the auditors' findings as metrics for Prometheus, until a signal."""
    from memq.cli.exporter import export_audit

    settings = settings_of(config, profile, **flags)
    log_to_stderr(settings.broker().log_level, settings.broker().log_format)
    listen = listen_address(serve, METRICS_PORT)
    return _asked(settings, lambda view, _: export_audit(view, listen, print_ready), state_of)


@auditor.command("verify", short_help="Fetch the object of FINDING again, and check it.")
@setting_options("brokers", *rules_of(AuditorSettings))
@click.argument("finding")
@json_option
def verify(finding: str, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Fetch the object of FINDING again, check its batch, and show its contents.

    Exits with 1 if the batch is damaged or missing.
    """
    settings = settings_of(config, profile, **flags)
    found = _asked(settings, lambda view, _: view.finding(finding))
    verified = asyncio.run(verify_finding(settings.client().brokers, found))
    if as_json:
        named = {"topic": verified.topic, "offset": verified.offset, "sound": verified.sound, "says": verified.says}
        print_json({**named, "faults": list(map(str, verified.faults))})
        return OK if verified.sound else FAILED
    for block in verified.blocks:
        records = f"producer {block.producer} sequences {block.first} to {block.next - 1}"
        click.echo(f"block {block.number}: {records}: {block.cause or 'sound'}")
    for fault in verified.faults:
        click.echo(fault)
    click.echo(f"{verified.topic}: pointer {verified.offset}: {verified.says} (read through {verified.through})")
    return OK if verified.sound else FAILED


# ---- inside --------------------------------------------------------------------------------------


async def _serve(brokers: str, state: Database, keep_ms: int, dashboard: EmbeddedService | None) -> int:
    from memq.runtime.process import Signals

    signals = Signals()
    try:
        async with AsyncExitStack() as stack:
            stack.callback(signals.close)
            stack.push_async_callback(state.close)
            audit = keep_auditing(brokers, state, keep_ms, Runtime(), partial(_print_auditing, brokers))
            works = [audit, *([dashboard(brokers)] if dashboard else [])]
            await _until(signals.first, _together(*works))
    finally:
        await state.close()
    return OK


def _print_auditing(brokers: str) -> None:
    click.echo(f"memq auditing: {brokers}")
    sys.stdout.flush()


async def _together(*works: Coroutine[Any, Any, None]) -> None:
    await asyncio.gather(*works)


async def _until(signal: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until the signal. Raises: as the work."""
    tasks = [asyncio.create_task(signal.wait()), asyncio.create_task(work)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    if not tasks[1].cancelled():
        tasks[1].result()


def _asked(
    settings: Settings,
    ask: Callable[[AuditView, AuditStore], Coroutine[Any, Any, Answer]],
    opener_of: Callable[[AuditorSettings], OpenState] = written_state,
) -> Answer:
    async def run() -> Answer:
        state = opener_of(state_setting(settings))()
        try:
            return await ask(AuditView(state), AuditStore(state))
        finally:
            await state.close()

    return asyncio.run(run())


def _sides(summary: TopicSummary) -> list[str]:
    return sorted({QUEUE, *summary.row.sides})


def _row_of(summary: TopicSummary, name: str, behind: str) -> tuple[object, ...]:
    side = summary.row.side(name)
    counts = (side[column] for column in ("lost", "doubled", "corrupt"))
    records, last = (side["committed"], "acked") if name == QUEUE else (side["processed"], "processed")
    took_ms = latencies([summary.row]).get((name, last), {})
    slow = (f"{took_ms[part]:.0f}" if took_ms else "-" for part in QUANTILES)
    return (doubted(summary.row.word(name), behind), records, *counts, summary.row.in_flight(name), *slow)


def _summary_json(summary: TopicSummary, behind: str) -> dict[str, Any]:
    took_ms = latencies([summary.row])
    sides = {
        name: {
            "verdict": doubted(summary.row.word(name), behind),
            **summary.row.side(name).counts,
            "in_flight": summary.row.in_flight(name),
            "latency_ms": {
                stage: {percentile_name(part): round(ms, 1) for part, ms in found.items()}
                for (side, stage), found in took_ms.items()
                if side == name
            },
        }
        for name in _sides(summary)
    }
    named = {"topic": summary.topic, "topic_id": summary.topic_id, "findings": summary.findings}
    return {**named, "behind": behind, "sides": sides}


def _minute_text(finding: Finding) -> str:
    return time_text(finding.minute * MINUTE_MS)[:16] + "Z"

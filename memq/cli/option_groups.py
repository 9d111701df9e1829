"""Help of commands with many options: the options under headings, in the order of `GROUPS`."""

from __future__ import annotations

import click

# heading: the options' names, whole, or beginnings with a final "_".
GROUPS: dict[str, tuple[str, ...]] = {
    "Addresses": ("host", "port", "http_port", "advertise"),
    "Storage": (
        *("data", "store", "queue", "coordinator", "spool", "spool_", "shared_age_ms_max", "staged_age_ms"),
        *("retention_", "sweep_", "delete_objects"),
    ),
    "Limits": ("memory_bytes_max", "connections_", "hello_", "frame_"),
    "Topics and transactions": ("auto_create_topics", "partitions", "transaction_"),
    "Security": ("insecure", "permissions", "quotas", "superusers", "broker_principals"),
    "Audit": ("audit", "audit_"),
    "Dashboard": ("dashboard_",),
    "Log and traces": ("log_", "traces"),
    "Place in the cluster": ("cluster", "broker_id", "zone", "capacity_bytes_s", "governor_strategy", "early_takeover"),
}
OTHERS = "Other options"


def heading_of(name: str) -> str:
    """Return the heading of an option."""
    for heading, names in GROUPS.items():
        if any(name == each or (each.endswith("_") and name.startswith(each)) for each in names):
            return heading
    return OTHERS


def _format_options(command: click.Command, context: click.Context, formatter: click.HelpFormatter) -> None:
    sections: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*GROUPS, OTHERS)}
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is not None:
            sections[heading_of(param.name or "")].append(record)
    for heading, records in sections.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)


class GroupedCommand(click.Command):
    """A command whose help has its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, heading by heading."""
        _format_options(self, ctx, formatter)


class GroupedGroup(click.Group):
    """The same for a command that has subcommands."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, heading by heading, then the subcommands."""
        _format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

"""Planted bugs of the live audit at work: its reads, judgements, state and withdrawn findings; see `planted_bugs`."""

from __future__ import annotations

from tests.simulation.bug import Planted, swap

AUDITOR_BUGS = (
    Planted(
        "auditor judges though a log was not read",
        "memq.audit.live.service",
        "LiveAudit._judge",
        swap("self._logs.lacks(log)", "False"),
        level="calm",
        seed=1_020,
        aspects=("auditor", "part"),
    ),
    Planted(
        "an index that does not answer is passed over",
        "memq.audit.live.log_follower",
        "LogFollower._take",
        swap("return error", "audit.state.next_offset = polled.entries.next"),
        aspects=("auditor",),
    ),
    Planted(
        "auditor stores how far it has read without what it has judged",
        "memq.audit.live.service",
        "LiveAudit._step_of",
        swap(
            "rows, findings = audit.take_rows(), audit.take_findings()",
            "rows, findings = audit.take_rows(), audit.take_findings()[:0]",
        ),
        level="calm",
        aspects=("auditor",),
    ),
    Planted(
        "findings are never taken back",
        "memq.audit.live.open_findings",
        "OpenFindings.hold",
        swap("kept = tuple(common(finding.ranges, RangeSet(left)))", "kept = finding.ranges"),
        level="calm",
        aspects=("auditor",),
    ),
    Planted(
        "an auditor that starts again hears reports from the end",
        "memq.audit.live.group_reports",
        "GroupReports.seek",
        swap("self._seek(home, at)", 'self._seek(home, "end")'),
        seed=1_005,
        aspects=("auditor",),
    ),
    Planted(
        "reports are stored as heard before they are judged",
        "memq.audit.live.service",
        "LiveAudit._take_page",
        swap(
            "home.position = page.next",
            "home.position = page.next\nfor audit in home.partitions.values(): audit.state.told.clear()",
        ),
        level="calm",
        aspects=("auditor",),
    ),
)

"""Findings as evidence for other programs: one CSV for the command and the pages. Pure."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO

from memq.audit.live.finding import LiveFinding

EVIDENCE_MAX = 100_000  # findings of one export
_COLUMNS = (
    *("id", "kind", "stage", "group", "topic", "topic_id", "partition", "minute", "producer", "records", "ranges"),
    *("object", "block", "offset", "cause", "first_seen_ms", "resolved_ms", "acknowledged_by", "acknowledged_ms"),
)


def csv_of(found: Sequence[LiveFinding]) -> str:
    """Return findings as CSV with a line of names.

    Ranges as first-last, both included, with spaces between.
    """
    text = StringIO()
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    for finding in found:
        values = finding.to_json() | {"ranges": " ".join(f"{first}-{next_ - 1}" for first, next_ in finding.ranges)}
        writer.writerow([values[column] for column in _COLUMNS])
    return text.getvalue()

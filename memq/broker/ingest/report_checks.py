"""Checks reports of the audit: a principal reports only about topics and groups that it may use.

An auditor believes what a report says. So without this check, a client with a permission on one topic could make false
findings about all others.
"""

from __future__ import annotations

from memq.broker.permissions.checks import PermissionChecks
from memq.errors import CorruptDataError, InvalidRequestError, MemqError
from memq.format.blocks.columns import BlockReader
from memq.format.blocks.header import BlockHeader
from memq.format.report import Kind, Report, decode_report
from memq.permissions import Permission, Resource, ResourceKind, topic_resource

OPERATION = "report"
_WRITERS: tuple[Kind, ...] = ("producer", "spark-writer")


def check_reports(block: memoryview, header: BlockHeader, checks: PermissionChecks, principal: str, peer: str) -> None:
    """Check all reports in a sound block.

    Raises: DeniedError, with an event; InvalidRequestError for a report that can't be read; NotReadyError.
    """
    for body in BlockReader(block, header).values():
        try:
            if body is None:
                raise CorruptDataError("a report without a value")
            report = decode_report(body)
        except MemqError as error:
            raise InvalidRequestError(f"no report of the audit: {error}", hint="upgrade the brokers first") from error
        checks.check(principal, _needs(report), OPERATION, peer)


def _needs(report: Report) -> list[tuple[Permission, Resource]]:
    """Return the permissions that the work in a report needs."""
    permission = Permission.WRITE if report.kind in _WRITERS else Permission.READ
    needs = [(permission, topic_resource(topic)) for topic in dict.fromkeys(part.topic for part in report.parts)]
    if report.kind == "consumer" and report.name:
        needs.append((Permission.READ, Resource(ResourceKind.GROUP, report.name)))
    return needs

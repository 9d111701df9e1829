"""Commands of the audit: verdicts, the auditor, traces of records."""

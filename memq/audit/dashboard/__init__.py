"""The dashboard: pages that show what the cluster does and what the audit found, kept up to date by an event stream."""

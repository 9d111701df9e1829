"""The dashboard: pages about the cluster and the findings of the audit, updated by an event stream."""

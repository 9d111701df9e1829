"""The audit engine: one account, finding, verdict and minute for batch audit, live audit and Spark."""

"""Declared state: a file of topics, groups, permissions and quotas, and the changes that it needs."""

"""Checks the permissions of requests, filters answers, and answers requests about the rules."""

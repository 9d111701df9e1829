"""The consumer as a member of its group: heartbeats, assignment, the connection to the owner."""

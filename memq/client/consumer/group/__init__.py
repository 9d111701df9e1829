"""The member of a group: what it holds, what it has done, what it commits."""

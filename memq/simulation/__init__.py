"""A whole cluster on virtual time, under seeded faults, for tests of programs that use memq."""

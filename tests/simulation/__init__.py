"""The whole cluster in one process: real shells on virtual time, from one seed, with the faults that it draws."""

"""What the simulation replaces of the machine: clock, network, tasks, threads, memory, log."""

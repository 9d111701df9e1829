"""Parts of the machine that the simulation replaces: clock, network, tasks, threads, memory, log."""

"""Virtual time, processes and network: one seed decides what runs when."""

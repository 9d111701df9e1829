"""The group coordinator: members, generations and positions of groups, as a machine on a state log."""

"""Commands about stored records and objects: audit, trace, inspect, verify, sweep, restore."""

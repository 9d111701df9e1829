"""Commands about stored records and objects: audit, trace, inspect, verify, compact, sweep, restore."""

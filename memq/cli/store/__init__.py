"""Commands about objects in the store: inspect, verify, sweep, restore."""

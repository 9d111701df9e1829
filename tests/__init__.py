"""The tests of memq, in rings: unit, contract, simulation, integration, chaos."""

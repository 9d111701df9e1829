"""A whole cluster on virtual time, under seeded faults, for tests of programs that use memq."""

from memq.simulation.simulation import Process as Process
from memq.simulation.simulation import Simulation as Simulation
from memq.simulation.world.loop import NotSimulatedError as NotSimulatedError
from memq.simulation.world.world import SimulationError as SimulationError

__all__ = ["NotSimulatedError", "Process", "Simulation", "SimulationError"]

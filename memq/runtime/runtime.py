"""`Runtime`: the clock, randomness, network, host name and process id that every shell gets.

Shells take these from their `Runtime` only, so the simulation replaces them in one place.
"""

from __future__ import annotations

import os
import platform
import random
from dataclasses import dataclass, field

from memq.runtime.clock import Clock, SystemClock
from memq.runtime.network import Network, client_network


@dataclass(frozen=True, slots=True)
class Runtime:
    """A shell's environment: time, randomness, network, the name of its host, and its process id there."""

    clock: Clock = field(default_factory=SystemClock)
    random: random.Random = field(default_factory=random.SystemRandom)
    network: Network = field(default_factory=client_network)
    host: str = field(default_factory=platform.node)
    pid: int = field(default_factory=os.getpid)

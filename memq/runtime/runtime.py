"""`Runtime`: the clock, randomness, network and host name that every shell gets.

Shells take these four from their `Runtime` only, so the simulation replaces them in one place.
"""

from __future__ import annotations

import platform
import random
from dataclasses import dataclass, field

from memq.runtime.clock import Clock, SystemClock
from memq.runtime.network import Network, SocketNetwork


@dataclass(frozen=True, slots=True)
class Runtime:
    """A shell's environment: time, randomness, network, and the name of its host."""

    clock: Clock = field(default_factory=SystemClock)
    random: random.Random = field(default_factory=random.SystemRandom)
    network: Network = field(default_factory=SocketNetwork)
    host: str = field(default_factory=platform.node)

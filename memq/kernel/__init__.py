"""The hot loops over blocks: compiled where the distribution memq-native is installed, else in Python.

The environment variable MEMQ_NATIVE selects: 1 (the default) for all parts that are compiled, 0 for none, or a list
of parts (`MEMQ_NATIVE=broker`). The first use decides for the whole process.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from memq.limits import VERSION

if TYPE_CHECKING:
    from memq.runtime.logs import EventLog

ABI = 4  # of the module memq_native; a change of any of its signatures changes it
PARTS = ("broker", "producer")
VARIABLE = "MEMQ_NATIVE"
_ON, _OFF = ("", "1", "on", "true", "yes"), ("0", "off", "false", "no")


class _Choice(NamedTuple):
    module: ModuleType | None
    parts: tuple[str, ...]  # compiled ones
    text: str
    fault: str = ""  # "": an installed memq-native works, and MEMQ_NATIVE names parts that exist
    remedy: str = ""


def compiled_module(part: str) -> ModuleType | None:
    """Return the compiled module if it is installed and `part` is not switched off, else None.

    The first call imports the module, and logs why an installed one can't be used.
    """
    assert part in PARTS, f"part {part}"
    choice = _choice()
    return choice.module if part in choice.parts else None


def description() -> str:
    """Return which code runs: `compiled (memq-native 0.1.0: broker, producer)`, or why it is Python."""
    return _choice().text


def fault() -> str:
    """Return why an installed memq-native is not used, or the unknown names in MEMQ_NATIVE; else ""."""
    return _choice().fault


def remedy() -> str:
    """Return what corrects the fault."""
    return _choice().remedy


@cache
def _choice() -> _Choice:
    value = os.environ.get(VARIABLE, "")
    wanted, unknown = _wanted(value)
    fault = remedy = ""
    if unknown:
        remedy = f"set {VARIABLE} to 0, to 1 or to known parts with commas, or unset it"
        fault = f"{VARIABLE} names unknown parts: {', '.join(unknown)}; known parts: {', '.join(PARTS)}"
        events = _events()
        events.warning("kernel-unknown-parts", fault)
    if not wanted:
        return _Choice(None, (), f"Python ({VARIABLE}={value})", fault, remedy)
    module, reason, broken = _load()
    if module is None:
        if broken:
            events = _events()
            events.warning("kernel-unusable", f"{reason}; memq runs in Python")
            fault, remedy = reason, f"pip install 'memq[native]' again, or set {VARIABLE}=0"
        return _Choice(None, (), f"Python ({reason})", fault, remedy)
    text = f"compiled (memq-native {module.VERSION}: {', '.join(wanted)})"
    if wanted != PARTS:
        text += f", the rest in Python ({VARIABLE}={value})"
    return _Choice(module, wanted, text, fault, remedy)


def _wanted(value: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parts that the variable leaves on, and names in it that are no parts."""
    bare = value.strip().lower()
    if bare in _ON:
        return PARTS, ()
    names = () if bare in _OFF else tuple(name.strip() for name in bare.split(",") if name.strip())
    return tuple(part for part in PARTS if part in names), tuple(name for name in names if name not in PARTS)


def _load() -> tuple[ModuleType | None, str, bool]:
    """Return the compiled module, or None with the reason, and whether the reason is a fault."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():  # the import would switch the lock on for the whole program
        return None, "this interpreter runs without its lock (GIL), which memq-native needs", False
    try:
        import memq_native
    except ModuleNotFoundError as error:
        if error.name == "memq_native":
            return None, "memq-native is not installed", False
        return None, f"memq-native can't be imported: {error}", True
    except Exception as error:  # noqa: BLE001  # built for another platform, or a damaged file: binary or Python
        text = str(error) if isinstance(error, (ImportError, OSError)) else f"{type(error).__name__}: {error}"
        return None, f"memq-native can't be imported: {text}", True
    abi, version = getattr(memq_native, "ABI", None), getattr(memq_native, "VERSION", "")
    if not version:  # also a folder of this name without files, which an interrupted installation leaves
        return None, "memq-native has no version: its installation is not complete", True
    if abi != ABI:
        return None, f"memq-native {version} has ABI {abi}, memq {VERSION} needs {ABI}", True
    return memq_native, "", False


def _events() -> EventLog:
    from memq.runtime.clock import SystemClock
    from memq.runtime.logs import EventLog

    return EventLog(SystemClock())

"""Plants a mutant into the functions of a process that has imported them, and takes it out again.

Theory. To import the product and its tests takes 5 s; to exchange the code of a function takes none, and whoever
imported the function sees it. Only what runs at import (defaults, decorators, tables) is out of reach: Unreachable.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from tests.mutation.mutant import ROOT, Mutant

CodePlace = tuple[str, str, int]  # file, qualified name, first line


class UnreachableError(Exception):
    """The mutant changes what ran when its module was imported."""


class LiveCode:
    """The functions of the product that exist in this process."""

    def __init__(self) -> None:
        gc.unfreeze()  # what is frozen is not listed
        self._functions: dict[CodePlace, list[FunctionType]] = {}
        inside = f"{ROOT}/memq/"
        for function in gc.get_objects():
            # No isinstance: it asks proxies of other libraries for the class of their targets.
            if type(function) is FunctionType and function.__code__.co_filename.startswith(inside):
                self._functions.setdefault(place_of(function.__code__), []).append(function)
        gc.freeze()
        self._before: list[tuple[FunctionType, CodeType]] = []

    def plant(self, mutant: Mutant) -> None:
        """Exchange the code of the function that the mutant changes. Raises: SyntaxError, UnreachableError."""
        file = str(ROOT / mutant.path)
        old = compile(mutant.original(), file, "exec", dont_inherit=True)
        new = compile(mutant.source(), file, "exec", dont_inherit=True)
        changed = list(changed_functions(old, new))
        for was, is_ in changed:
            for function in self._functions.get(place_of(was), ()):
                if function.__code__.co_freevars != is_.co_freevars:
                    raise UnreachableError(f"{mutant} changes what its function encloses")
                self._before.append((function, function.__code__))
                function.__code__ = is_
        if not self._before:
            raise UnreachableError(f"no function of this process has {mutant}")

    def restore(self) -> None:
        """Take the mutant out."""
        for function, code in self._before:
            function.__code__ = code
        self._before = []


def place_of(code: CodeType) -> CodePlace:
    """Return where a function is defined."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


def nested(code: CodeType) -> list[CodeType]:
    """Return the code of functions and classes that are defined directly in `code`."""
    return [const for const in code.co_consts if isinstance(const, CodeType)]


def shape(code: CodeType) -> tuple[object, ...]:
    """Return what a piece of code does, but for its lines and for what is nested in it."""
    consts = tuple(
        "code" if isinstance(const, CodeType) else (type(const).__name__, repr(const)) for const in code.co_consts
    )
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, consts


def differ(old: CodeType, new: CodeType) -> bool:
    """Whether two pieces of code, or pieces nested in them, do different things."""
    pairs = nested(old), nested(new)
    if shape(old) != shape(new) or len(pairs[0]) != len(pairs[1]):
        return True
    return any(differ(*pair) for pair in zip(*pairs, strict=True))


def changed_functions(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield the functions that differ, before and after, outer ones first. Raises: UnreachableError."""
    inner = nested(old), nested(new)
    same_names = [code.co_name for code in inner[0]] == [code.co_name for code in inner[1]]
    if not old.co_flags & inspect.CO_OPTIMIZED:  # the body of a module or of a class: it has run
        if shape(old) != shape(new) or not same_names:
            raise UnreachableError(f"{old.co_qualname} has run already")
    elif differ(old, new):
        yield old, new
    if same_names:
        for was, is_ in zip(*inner, strict=True):
            yield from changed_functions(was, is_)

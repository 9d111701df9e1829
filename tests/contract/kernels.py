"""The implementations of `memq.kernel.blocks`: Python, and the compiled one of memq-native."""

from __future__ import annotations

import os
import shutil
from typing import Any, cast

import pytest

from memq.kernel import blocks_pure_python, compiled_module
from memq.kernel.blocks import BlockKernel

KINDS = ("Python", "compiled")


def block_kernel(kind: str) -> BlockKernel:
    """Return an implementation.

    Without memq-native, the test of the compiled one is skipped. It fails where all tests are required, and where a
    compiler is installed: `make` builds memq-native there.
    """
    if kind == "Python":
        return blocks_pure_python
    found = compiled_module("broker")
    if found is None:
        text = "memq-native is not installed, or has another ABI"
        if os.environ.get("MEMQ_REQUIRE_SERVERS") == "1" or shutil.which("cargo"):
            pytest.fail(f"{text}; build it from native/")
        pytest.skip(text)
    return cast(BlockKernel, cast(Any, found))

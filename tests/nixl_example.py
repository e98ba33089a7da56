"""The modules of examples/nixl. NIXL itself is loaded only by processes that they start."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
from disaggregated_example import EXAMPLES
from tiers import full

EXAMPLE = EXAMPLES / "nixl"
INSTALL = "pip install --no-deps nixl nixl-cu12"
sys.path.append(str(EXAMPLE))  # for this process, and those that it spawns

import kvlayout  # noqa: E402
import paging  # noqa: E402
import ranks  # noqa: E402
import records  # noqa: E402
import roles  # noqa: E402
import transfer  # noqa: E402

_HAS_NIXL = importlib.util.find_spec("nixl") is not None and any(
    importlib.util.find_spec(f"nixl_{backend}") is not None for backend in ("cu12", "cu13", "rocm")
)


def with_nixl(test: Any) -> Any:
    """Run a test in the full tier, where NIXL is installed."""
    skip = pytest.mark.skipif(not _HAS_NIXL, reason=f"NIXL is not installed: {INSTALL}")
    return full(skip(test))


__all__ = [
    "EXAMPLE",
    "INSTALL",
    "kvlayout",
    "paging",
    "ranks",
    "records",
    "roles",
    "transfer",
    "with_nixl",
]

"""Checks of one model: ``pairs`` has those of KV pairs; each other file here is a further one.

A further check is one file. It declares its codes, and has a function ``check`` with the
arguments of :func:`check_model`::

    from onnxkvrename.findings import build_finding, declare_code

    declare_code("KV999", "warning", "a model with more than 200 layers")

    def check(signature, plan, uses):
        layers = {pair.layer for pair in plan.pairs}
        if len(layers) > 200:
            yield build_finding("KV999", "", f"has {len(layers)} layers", "split the model")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module

from onnxkvrename.findings import CODES, Finding, Severity
from onnxkvrename.model.signature import NameUses, Signature
from onnxkvrename.rules.checks.pairs import check_pairs
from onnxkvrename.rules.plan import RenamePlan

Check = Callable[[Signature, RenamePlan, NameUses], Iterator[Finding]]


def check_model(signature: Signature, plan: RenamePlan, uses: NameUses) -> Iterator[Finding]:
    """Check one model, as it is and as it will be after the rename.

    Args:
        signature: The model's graph inputs and outputs.
        plan: Its pairs, and their new names.
        uses: Where the graph uses the names that matter to the plan.

    Yields:
        Findings KV101 to KV109, KV111, KV112, KV125, KV201, KV202 and KV204, then those of
        further checks.
    """
    yield from check_pairs(signature, plan, uses)
    for check in load_further_checks():
        yield from check(signature, plan, uses)


def load_further_checks() -> list[Check]:
    """Import every further file in this folder, by name, and return its function ``check``."""
    files = sorted(name for folder in __path__ for name in os.listdir(folder))
    names = [file.removesuffix(".py") for file in files if file.endswith(".py")]
    return [
        import_module(f"{__name__}.{name}").check
        for name in names
        if name not in ("__init__", "pairs")
    ]


def load_codes() -> dict[str, tuple[Severity, str]]:
    """Return severity and meaning of every code, those of further checks included, in order."""
    load_further_checks()
    return dict(sorted(CODES.items()))

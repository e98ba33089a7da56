"""onnxruntime runs models in this process, where its own process is not what is tested."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from typing import Any
from unittest.mock import patch

import pytest

from onnxkvrename.verification.running import isolated_run, run_process


@pytest.fixture(autouse=True)
def run_here() -> Iterator[None]:
    """Serve each request in this process, without limits; a test module may override this.

    It is no patch of the test's own, so that the commands in hints are tried as well.
    """
    with patch.object(isolated_run, "_run_process", _serve_here):
        yield


def _serve_here(request: bytes, seconds: int) -> Any:
    stdout = TextIOWrapper(BytesIO())
    with (
        patch.object(sys, "stdout", stdout),
        patch.multiple(run_process, limit_process=_set_no_limit, limit_memory=_set_no_limit),
    ):
        run_process.serve_request(json.loads(request))
    return isolated_run._EndedProcess(0, stdout.buffer.getvalue(), False)


def _set_no_limit(*_: object) -> None:
    pass

"""onnxruntime runs models in this process, where its own process is not what is tested."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from onnxkvrename.records import serialize
from onnxkvrename.verification.running import isolated_run


@pytest.fixture(autouse=True)
def run_here() -> Iterator[None]:
    """Serve each request in this process, without limits; a test module may override this.

    It is no patch of the test's own, so that the commands in hints are tried as well.
    """
    with patch.object(isolated_run, "_run_process", _serve_here):
        yield


def _serve_here(request: bytes, *_: object) -> Any:
    loop, _limits = pickle.loads(request)
    reply = json.dumps(serialize(isolated_run._run_loop(loop)))
    return isolated_run._EndedProcess(0, reply.encode(), b"")

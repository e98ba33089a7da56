from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from onnxkvrename import RulesError, load_rules
from onnxkvrename.rules.load import list_profiles


def test_a_profile_that_nobody_has_is_refused_with_all_that_there_are() -> None:
    with pytest.raises(RulesError, match="no such profile: nobody") as caught:
        load_rules("nobody")
    assert caught.value.hint == f"profiles: {', '.join(list_profiles())}"


def test_a_plain_rename_does_not_look_at_distributions(decoder: Path) -> None:
    script = (
        "import sys; from onnxkvrename.cli.main import main; code = main(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", script, decoder, "--prefix", "VLLM", "--profile", "qeff"]
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert process.returncode == 0
    assert not {"importlib.metadata", "difflib"} & set(process.stderr.split())

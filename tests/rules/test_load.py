from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from conftest import Run
from onnx import TensorProto, helper

from onnxkvrename import RulesError, load_rules
from onnxkvrename.rules.load import has_profile, list_profiles

PROFILE = r"""
retained = 'present\..*'
[[kv]]
input = 'past_key_values\.(?P<layer>[0-9]+)\.(?P<buffer>key|value)(?:_(?P<token>[A-Za-z0-9]+))?'
output = 'present\.(?P<layer>[0-9]+)\.(?P<buffer>key|value)(?:_(?P<token>[A-Za-z0-9]+))?'
input_name = "past_key_values.{layer}.{buffer}[_{token}]"
output_name = "present.{layer}.{buffer}[_{token}]"
kinds.attention.parts = ["key", "value"]
"""
MODULE = f"""
from importlib.resources import files
from pathlib import Path

TEXT = {PROFILE!r}
PATH = Path(__file__).parent / "profile.toml"
RESOURCE = files("hub_profiles") / "profile.toml"
MISSING = Path(__file__).parent / "none.toml"
NUMBER = 3
MALFORMED = "retained = 1"

class Odd:
    def __init__(self, error):
        self.error = error

    def __fspath__(self):
        raise self.error

EXITS, INTERRUPTS, RECURS = map(Odd, (SystemExit(0), GeneratorExit(), RecursionError("deep")))
"""

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a distribution with profiles, beside the others."""

    def install_distribution(name: str = "hub-profiles", **profiles: str) -> Path:
        site = tmp_path / "site"
        package = site / "hub_profiles"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(MODULE, "utf-8")
        (package / "profile.toml").write_text(PROFILE, "utf-8")
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{profile} = {value}" for profile, value in profiles.items()]
        (info / "entry_points.txt").write_text("\n".join(["[onnxkvrename.profiles]", *lines]))
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, "hub_profiles", raising=False)
        return site

    return install_distribution


@pytest.mark.parametrize("attribute", ["TEXT", "PATH", "RESOURCE"])
def test_another_distribution_adds_a_profile(install: Install, attribute: str) -> None:
    built_in = list_profiles()
    install(hub=f"hub_profiles:{attribute}")
    rules = load_rules("hub")
    assert rules.name == "hub"
    assert rules.match("input", "past_key_values.3.key") is not None
    assert list_profiles() == tuple(sorted((*built_in, "hub")))
    assert [has_profile(name) for name in ("hub", "qeff", "nobody")] == [True, True, False]


def test_a_built_in_profile_cannot_be_shadowed(install: Install) -> None:
    built_in = list_profiles()
    install(qeff="hub_profiles:TEXT")
    assert load_rules("qeff").match("input", "past_key.3") is not None
    assert list_profiles() == built_in


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("nowhere:TEXT", "'nowhere'"),
        ("hub_profiles:NONE", "AttributeError: module 'hub_profiles' has no"),
        ("hub_profiles:NUMBER", "not int"),
        ("hub_profiles", "not module"),
        ("hub_profiles:MISSING", "none.toml: no such file"),
        ("hub_profiles:MALFORMED", "kv: is missing"),
        ("not a reference", "cannot be used: "),
        ("hub_profiles:EXITS", "SystemExit: 0"),
        ("hub_profiles:INTERRUPTS", "GeneratorExit"),
        ("hub_profiles:RECURS", "RecursionError: deep"),
    ],
)
def test_a_broken_profile_names_its_distribution_when_it_is_asked_for(
    install: Install, value: str, reason: str
) -> None:
    install(hub=value)
    assert load_rules("qeff").name == "qeff"
    assert "hub" in list_profiles()
    with pytest.raises(RulesError) as caught:
        load_rules("hub")
    source = "the plug-in hub of hub-profiles (onnxkvrename.profiles)"
    assert str(caught.value).startswith(f"{source} cannot be used: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_distributions_with_one_profile_are_both_named(install: Install) -> None:
    install("hub-profiles", hub="hub_profiles:TEXT")
    install("other-profiles", hub="hub_profiles:PATH")
    with pytest.raises(RulesError, match="hub-profiles and other-profiles"):
        load_rules("hub")


def test_a_profile_that_nobody_has_is_refused_with_all_that_there_are(install: Install) -> None:
    install(hub="hub_profiles:TEXT")
    with pytest.raises(RulesError) as caught:
        load_rules("nobody")
    assert "hub" in list_profiles()
    assert "no such profile: nobody" in str(caught.value)


def test_a_rename_uses_the_profile_of_another_distribution(
    install: Install, tmp_path: Path, run: Run
) -> None:
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, "context", 4])
        for kind in ("key", "value")
        for name in (f"past_key_values.0.{kind}", f"present.0.{kind}")
    ]
    nodes = [
        helper.make_node("Identity", [ends[index].name], [ends[index + 1].name]) for index in (0, 2)
    ]
    model = tmp_path / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", ends[::2], ends[1::2])), model)
    install(hub="hub_profiles:RESOURCE")
    outcome = run(model, "--prefix", "VLLM", "--profile", "hub")
    assert outcome.code == 0, outcome.err
    assert "past_key_values.0.key -> past_key_values.0.key_VLLM\n" in outcome.out
    assert [value.name for value in onnx.load(model).graph.output] == [
        "present.0.key_VLLM",
        "present.0.value_VLLM",
    ]


def test_a_built_in_profile_does_not_look_at_distributions(decoder: Path) -> None:
    script = (
        "import sys; from onnxkvrename.cli.main import main; code = main(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", script, decoder, "--prefix", "VLLM", "--profile", "qeff"]
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert process.returncode == 0
    assert not {"importlib.metadata", "difflib"} & set(process.stderr.split())

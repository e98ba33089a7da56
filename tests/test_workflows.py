"""The workflows on GitHub: which Pythons, which actions, which permissions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = {path.stem: path for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def load(name: str) -> Any:
    return yaml.safe_load(WORKFLOWS[name].read_text("utf-8"))


def list_steps(name: str) -> list[dict[str, Any]]:
    return [step for job in load(name)["jobs"].values() for step in job["steps"]]


def test_every_python_that_the_package_states_is_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    stated = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    jobs = load("ci")["jobs"]
    matrix = jobs["tests"]["strategy"]["matrix"]
    others = [each for each in matrix["include"] if each["os"] not in matrix["os"]]
    one = [
        step["with"]["python-version"]
        for step in jobs["all-checks"]["steps"]
        if "with" in step and "python-version" in step["with"]
    ]
    assert sorted(stated) == sorted([*matrix["python"], *one])
    assert {each["os"] for each in others} == {"macos-latest", "windows-latest"}


def test_every_push_runs_the_full_tier_once() -> None:
    tests = load("ci")["jobs"]["tests"]
    full = [each for each in tests["strategy"]["matrix"]["include"] if "tier" in each]
    assert [(each["os"], each["tier"]) for each in full] == [("ubuntu-latest", "--full")]
    assert full[0]["python"] in tests["strategy"]["matrix"]["python"]  # adds to that job, no other
    assert tests["steps"][-1]["run"] == "python -m pytest ${{ matrix.tier }}"


def test_what_only_ci_installs_is_tested_there_in_full() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    default, full = 'eval "$(block README.md test)"', ".venv/bin/pytest --full tests/faults "
    assert 0 < script.index(default) < script.index(full)
    listed = script.partition(full)[2].replace("\\\n", " ").split()
    assert {path for path in listed if not (ROOT / path).exists()} == set()
    for path in ROOT.glob("tests/test_*.py"):
        text = path.read_text("utf-8")
        if "from tiers import" in text and re.search("^from witness ", text, re.M):
            assert f"tests/{path.name}" in listed


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_and_a_checkout_keeps_no_credentials(name: str) -> None:
    actions = [step for step in list_steps(name) if "uses" in step]
    assert actions
    for step in actions:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])
        if step["uses"].startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_only_the_job_that_publishes_may_prove_who_it_is() -> None:
    assert [load(name)["permissions"] for name in sorted(WORKFLOWS)] == [{"contents": "read"}] * 2
    granted = {
        job: load(name)["jobs"][job]["permissions"]
        for name in WORKFLOWS
        for job in load(name)["jobs"]
        if "permissions" in load(name)["jobs"][job]
    }
    assert granted == {"publish": {"id-token": "write"}}
    publish = load("release")["jobs"]["publish"]
    assert (publish["environment"], publish["needs"]) == ("release", "build")
    assert not any("password" in step.get("with", {}) for step in publish["steps"])


def test_issues_ask_for_what_inspect_says() -> None:
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert "onnxkvrename inspect MODEL --format json" in form.read_text("utf-8"), form.name

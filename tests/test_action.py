"""The action, its steps run by bash as a GitHub runner runs them."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path

import ci_machine
import pytest
from ci_machine import ACTION, Machine
from conftest import FIXTURES, Snapshot
from tiers import full, thin

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
STEPS = ACTION["runs"]["steps"]
ANNOTATION = re.compile(r"::(error|warning|notice) file=([^,]+),title=[^:]+::.+")
GIVEN = {"paths": "windows", "prefix": "VLLM", "install": "none"}

BACKEND = """
from zipfile import ZipFile, ZipInfo

def build_wheel(directory, config_settings=None, metadata_directory=None):
    "A wheel whose command is the one that the tests run."
    name = "onnxkvrename-0-py3-none-any.whl"
    about = "onnxkvrename-0.dist-info"
    command = ZipInfo("onnxkvrename-0.data/scripts/onnxkvrename")
    command.external_attr = 0o100755 << 16
    with ZipFile(f"{directory}/{name}", "w") as wheel:
        wheel.writestr(command, open("command").read())
        metadata = "Metadata-Version: 2.1\\nName: onnxkvrename\\nVersion: 0"
        wheel.writestr(f"{about}/METADATA", metadata)
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any")
        wheel.writestr(f"{about}/RECORD", "")
    return name
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A runner with a set of windows without a token in its workspace."""
    made = ci_machine.build_machine(tmp_path)
    shutil.copytree(FIXTURES / "plain" / "windows", made.workspace / "windows")
    return made


def annotated(out: str) -> list[tuple[str, str]]:
    """Severity and file of each annotation; every line is one, and the last one counts models."""
    *lines, total = out.splitlines()
    assert total.startswith("::notice title=total::")
    found = [ANNOTATION.fullmatch(line) for line in lines]
    assert None not in found, out
    return [(match[1], match[2]) for match in found if match]


def test_the_action_has_what_a_composite_action_must_have() -> None:
    assert set(ACTION) == {"name", "description", "inputs", "outputs", "runs"}
    assert set(ACTION["runs"]) == {"using", "steps"}
    assert ACTION["runs"]["using"] == "composite"
    for step in STEPS:
        assert set(step) == {"id", "name", "shell", "env", "run"}
    assert len({step["id"] for step in STEPS}) == len(STEPS)


def test_an_input_is_required_or_has_a_default_which_is_a_string() -> None:
    for meaning in ACTION["inputs"].values():
        assert meaning["description"]
        assert meaning.get("required") is True or isinstance(meaning["default"], str)


def test_no_expression_stands_in_a_script() -> None:
    assert [step["id"] for step in STEPS if "${{" in step["run"]] == []


def test_each_input_reaches_a_script_by_the_variable_of_its_name() -> None:
    given = {name: value for step in STEPS for name, value in step["env"].items()}
    read = {name for step in STEPS for name in re.findall(r"INPUT_\w+|COMMAND", step["run"])}
    expected = {f"INPUT_{name.upper()}": f"${{{{ inputs.{name} }}}}" for name in ACTION["inputs"]}
    assert given == {"COMMAND": "${{ steps.install.outputs.command }}", **expected}
    assert read == set(given)


def test_names_that_would_change_fail_the_step_and_change_nothing(
    machine: Machine, snapshot: Snapshot
) -> None:
    before = snapshot(machine.workspace)
    outcome = ci_machine.run_action(machine, GIVEN)
    assert (outcome.code, outcome.outputs) == (1, {"exit-code": "1"})
    assert annotated(outcome.out) == [
        ("error", f"windows/layer_{n}_{n + 1}/Tiny_layer_tmp_{n}_{n + 1}.onnx") for n in range(3)
    ]
    assert snapshot(machine.workspace) == before


def test_without_check_the_windows_are_renamed_and_then_nothing_would_change(
    machine: Machine, snapshot: Snapshot
) -> None:
    renamed = ci_machine.run_action(machine, {**GIVEN, "check": "false"})
    assert (renamed.code, renamed.outputs) == (0, {"exit-code": "0"})
    for path in (machine.workspace / "windows").rglob("*.*"):
        wanted = FIXTURES / "VLLM" / "windows" / path.relative_to(machine.workspace / "windows")
        assert path.read_bytes() == wanted.read_bytes()
    checked = ci_machine.run_action(machine, GIVEN)
    assert (checked.code, checked.outputs) == (0, {"exit-code": "0"})
    assert annotated(checked.out) == []  # what is unchanged is counted


def test_a_path_that_is_not_there_is_a_job_that_could_not_be_done(machine: Machine) -> None:
    outcome = ci_machine.run_action(machine, {**GIVEN, "paths": "nowhere"})
    assert (outcome.code, outcome.outputs) == (2, {"exit-code": "2"})
    assert "nowhere: no such file" in outcome.err


def test_a_window_that_is_missing_is_a_finding(machine: Machine) -> None:
    shutil.rmtree(machine.workspace / "windows" / "layer_1_2")
    outcome = ci_machine.run_action(machine, {**GIVEN, "check": "false"})
    assert (outcome.code, outcome.outputs) == (1, {"exit-code": "1"})
    assert "title=KV302::" in outcome.out


def test_args_are_further_options(machine: Machine) -> None:
    args = "--jobs 1\n  -d   renamed\n"
    outcome = ci_machine.run_action(machine, {**GIVEN, "check": "false", "args": args})
    assert outcome.code == 0, outcome
    assert len(list((machine.workspace / "renamed").rglob("*.onnx"))) == 3


def test_strict_makes_a_warning_fail_the_step(machine: Machine) -> None:
    shutil.copy(FIXTURES / "VLLM" / "internal_suffix.onnx", machine.workspace)
    given = {**GIVEN, "paths": "internal_suffix.onnx"}
    assert ci_machine.run_action(machine, given).code == 0
    assert ci_machine.run_action(machine, {**given, "strict": "true"}).code == 1


def test_rules_and_profile_are_the_ones_given(machine: Machine) -> None:
    no_rules = ci_machine.run_action(machine, {**GIVEN, "rules": "my rules.toml"})
    assert (no_rules.code, "my rules.toml: no such file" in no_rules.err) == (2, True)
    no_profile = ci_machine.run_action(machine, {**GIVEN, "profile": "nobody"})
    assert (no_profile.code, "no such profile: nobody" in no_profile.err) == (2, True)


@pytest.mark.parametrize("name", ["check", "strict"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("yes", ", not 'yes'"),
        ("", ", not ''"),
        ("::error::true", ""),  # could be a command of its own
        ("true\n::error::x", ""),
    ],
)
def test_a_switch_is_true_or_false(machine: Machine, name: str, value: str, said: str) -> None:
    outcome = ci_machine.run_action(machine, {**GIVEN, name: value})
    assert (outcome.code, outcome.outputs) == (2, {"exit-code": "2"})
    assert outcome.out == f"::error::input {name} must be true or false{said}\n"


@pytest.mark.parametrize("value", ["True", "TRUE"])
def test_a_switch_may_be_capitalized_as_in_other_actions(machine: Machine, value: str) -> None:
    shutil.copy(FIXTURES / "VLLM" / "internal_suffix.onnx", machine.workspace)
    given = {**GIVEN, "paths": "internal_suffix.onnx"}
    assert ci_machine.run_action(machine, {**given, "strict": value}).code == 1


def test_a_pattern_is_not_expanded_and_no_shell_is_blamed(machine: Machine) -> None:
    outcome = ci_machine.run_action(machine, {**GIVEN, "paths": "windows/*.onnx"})
    assert outcome.code == 2
    assert "windows/*.onnx: no such file (a pattern is not expanded here: pass" in outcome.err


def test_a_target_decides_the_token(machine: Machine) -> None:
    inputs = {"paths": "windows", "target": "vllm-qaic", "install": "none", "check": "false"}
    assert ci_machine.run_action(machine, inputs).code == 0
    for path in (machine.workspace / "windows").rglob("*.onnx"):
        assert b"past_key.0" not in path.read_bytes().replace(b"past_key.0_vllmKvCache", b"")


@pytest.mark.parametrize(
    ("name", "said"), [("paths", "no MODEL given"), ("prefix", "no token given")]
)
def test_an_input_left_out_is_told(machine: Machine, name: str, said: str) -> None:
    outcome = ci_machine.run_action(machine, {**GIVEN, name: ""})
    assert (outcome.code, said in outcome.err) == (2, True)


def test_several_paths_stand_one_on_each_line(machine: Machine) -> None:
    for name in ("a b", " c"):
        shutil.copytree(machine.workspace / "windows", machine.workspace / name)
    outcome = ci_machine.run_action(machine, {**GIVEN, "paths": "a b\n\n c\n"})
    assert outcome.code == 1
    assert {file.partition("/")[0] for _, file in annotated(outcome.out)} == {"a b", " c"}


def read_summary(summary: str) -> list[list[str]]:
    """Return the cells of the table in a step's summary, as a browser shows them."""
    head, line, *rows = summary.partition("\n\n")[2].splitlines()
    assert (head, line) == ("| | file | title | message |", "|---|---|---|---|")
    cells = [re.fullmatch(r"\| (.*?) \| (.*?) \| (.*?) \| (.*) \|", row) for row in rows]
    assert None not in cells, summary
    shown = [[str(cell) for cell in match.groups()] for match in cells if match]
    for cell in itertools.chain(*shown):
        assert not re.search(r"[!-/:-@\[-`{-~]", re.sub(r"\\[!-/:-@\[-`{-~]", "", cell))
    return [[re.sub(r"\\(.)", r"\1", cell) for cell in row] for row in shown]


def test_the_summary_is_a_table_of_the_results(machine: Machine) -> None:
    outcome = ci_machine.run_action(machine, GIVEN)
    assert outcome.summary.startswith(
        "### onnxkvrename: findings, or names to change (exit code 1)"
    )
    *rows, total = read_summary(outcome.summary)
    file = "windows/layer_{0}_{1}/Tiny_layer_tmp_{0}_{1}.onnx"
    names = "4 of 4 names lack VLLM (first: past_key.{}); run `onnxkvrename windows --prefix VLLM`"
    assert rows == [
        ["error", file.format(n, n + 1), "KV token missing", names.format(n)] for n in range(3)
    ]
    assert total[:3] == ["notice", "", "total"]
    assert total[3].startswith("3 models: 3 would change")


def test_the_summary_says_that_nothing_is_wrong(machine: Machine) -> None:
    ci_machine.run_action(machine, {**GIVEN, "check": "false"})
    outcome = ci_machine.run_action(machine, GIVEN)
    assert outcome.summary.startswith("### onnxkvrename: passed\n")
    assert [row[:3] for row in read_summary(outcome.summary)] == [["notice", "", "total"]]
    quiet = ci_machine.run_action(machine, {**GIVEN, "args": "-q"})
    assert quiet.summary == "### onnxkvrename: passed\n\n"


def test_the_summary_says_why_the_job_could_not_be_done(machine: Machine) -> None:
    outcome = ci_machine.run_action(machine, {**GIVEN, "paths": "nowhere"})
    assert outcome.summary.startswith("### onnxkvrename: the job could not be done (exit code 2)")
    ((level, file, title, message),) = read_summary(outcome.summary)
    assert (level, file, title) == ("error", "nowhere", "failed")
    assert "no such file" in message


@pytest.mark.parametrize(
    "name", ["a|b <img src=x> `c` [d](http://e) &amp; *f*", "100%3A,%2C%25 \\| ::g"]
)
def test_a_name_is_text_in_the_summary(machine: Machine, name: str) -> None:
    folder = name.replace("/", "")
    (machine.workspace / "windows").rename(machine.workspace / folder)
    outcome = ci_machine.run_action(machine, {**GIVEN, "paths": folder})
    assert outcome.code == 1
    files = [row[1] for row in read_summary(outcome.summary)[:-1]]
    assert [file.partition("/layer_")[0] for file in files] == [folder] * 3


def test_no_summary_is_needed(machine: Machine) -> None:
    for place in ("", "/no/such/directory/summary"):
        outcome = ci_machine.run_action(machine, GIVEN, GITHUB_STEP_SUMMARY=place)
        assert (outcome.code, outcome.outputs) == (1, {"exit-code": "1"})


HOSTILE = (
    "two words",
    'it\'s "quoted"',
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "' ; touch pwned '",
    '" && touch pwned && "',
    "$PATH ${IFS} ~ \\",
    "*",
    "-rf",
    "--help",
    "${{ inputs.prefix }}",
    "::error::no",
)
RUNNABLE = ("$(touch pwned)", '"; touch pwned; "', "*", "x\n$(touch pwned)\n::error::no")


@pytest.mark.parametrize("name", thin(HOSTILE, 2))
def test_a_path_is_a_path_whatever_it_is_called(machine: Machine, name: str) -> None:
    (machine.workspace / "windows").rename(machine.workspace / name)
    outcome = ci_machine.run_action(machine, {**GIVEN, "paths": name})
    assert (outcome.code, outcome.err) == (1, "")
    shown = name.replace(":", "%3A")
    assert [file.partition("/layer_")[0] for _, file in annotated(outcome.out)] == [shown] * 3
    assert [path.name for path in machine.workspace.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "text"),
    thin(itertools.product(sorted(set(ACTION["inputs"]) - {"install"}), RUNNABLE), 4),
)
def test_nothing_given_is_run(machine: Machine, name: str, text: str, snapshot: Snapshot) -> None:
    (machine.workspace / "--help").touch()  # what * would mean, were it a pattern
    before = snapshot(machine.workspace)
    outcome = ci_machine.run_action(machine, {**GIVEN, name: text})
    assert outcome.code == 2
    assert "::error::no" not in (outcome.out + outcome.err).splitlines()
    assert snapshot(machine.workspace) == before


@pytest.mark.parametrize("text", HOSTILE)
def test_what_to_install_is_one_word_for_pip(machine: Machine, text: str) -> None:
    pip = machine.add_tool("pip", r'printf "<%s>" "$@" >&2')
    machine.add_tool("python3", f'mkdir -p "$4/bin" && cp "{pip}" "$4/bin/python"')
    outcome = ci_machine.run_action(machine, {**GIVEN, "install": text})
    assert outcome.err.endswith(f"<--><{text}>" + outcome.err.rpartition(">")[2])
    assert "<-I><-m><pip><install>" in outcome.err
    assert not (machine.workspace / "pwned").exists()


@full
def test_the_action_installs_its_own_checkout_and_nothing_of_the_workspace(
    machine: Machine, tmp_path: Path
) -> None:
    checkout = tmp_path / "the action"
    checkout.mkdir()
    for name, text in {"pyproject.toml": PROJECT, "backend.py": BACKEND}.items():
        (checkout / name).write_text(text, "utf-8")
    (machine.tools / "onnxkvrename").rename(checkout / "command")
    for name in ("venv.py", "pip.py"):
        (machine.workspace / name).write_text("raise SystemExit('ran what was checked out')")
    outcome = ci_machine.run_action(machine, {**GIVEN, "install": ""}, checkout, PIP_NO_INDEX="1")
    assert (outcome.code, outcome.outputs) == (1, {"exit-code": "1"}), outcome.err
    assert len(annotated(outcome.out)) == 3
    assert (machine.temp / "onnxkvrename" / "bin" / "onnxkvrename").exists()


def test_what_cannot_be_installed_fails_the_step_before_anything_runs(machine: Machine) -> None:
    machine.add_tool("python3", "echo no venv here >&2; exit 1")
    outcome = ci_machine.run_action(machine, {**GIVEN, "install": ""})
    assert (outcome.code, outcome.out, outcome.outputs) == (1, "", {"exit-code": ""})

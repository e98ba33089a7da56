"""The blocks of docs/ci.md: what people copy is what is tested."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import ci_machine
import pytest
import yaml
from ci_machine import ACTION, ROOT, Machine
from conftest import FIXTURES, Snapshot
from tiers import thin

import onnxkvrename

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
TEXT = (ROOT / "docs" / "ci.md").read_text("utf-8")
CASES = [("plain", 1), ("renamed", 0)]
STATES = pytest.mark.parametrize(("state", "code"), thin(CASES, 1))
SHELLS = ("sh", "sh -xe", "bash", "bash --noprofile --norc -eo pipefail")
PACKAGE = "/a wheel.whl"


def block(name: str) -> str:
    """The block between two markers."""
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```\n<!-- /{name} -->", TEXT, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine whose pip gives each virtual environment, and the system, our command."""
    made = ci_machine.build_machine(tmp_path)
    command = (made.tools / "onnxkvrename").rename(made.temp / "command")
    install = f'test "$3" = "{PACKAGE}" && cp "{command}" "$(dirname "$0")/onnxkvrename"'
    pip = made.add_tool("pip", f'test "$1 $2" = "install -q" && {install}')
    made.add_tool(
        "python3", f'test "$1 $2" = "-m venv" && mkdir -p "$3/bin" && cp "{pip}" "$3/bin/"'
    )
    return made


def exported(machine: Machine, state: str = "plain") -> Path:
    """The windows of a set, in the working directory."""
    there = machine.workspace / "windows"
    shutil.copytree(FIXTURES / "plain" / "windows", there)
    if state == "renamed":
        assert not onnxkvrename.rename_all([there], "vllmKvCache").failed
    return there


def installed(machine: Machine) -> None:
    """The command on PATH."""
    shutil.copy(machine.temp / "command", machine.tools / "onnxkvrename")


def models(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(("state", "code"), CASES)
def test_the_workflow_with_the_action(machine: Machine, state: str, code: int) -> None:
    exported(machine, state)
    installed(machine)
    (job,) = yaml.safe_load(block("github-action"))["jobs"].values()
    (step,) = (step for step in job["steps"] if "onnxkvrename" in step["uses"])
    assert step["with"].keys() <= ACTION["inputs"].keys()
    assert ci_machine.run_action(machine, {**step["with"], "install": "none"}).code == code


@STATES
def test_the_gate(machine: Machine, state: str, code: int) -> None:
    before = models(exported(machine, state))
    installed(machine)
    assert machine.run_script(block("gate")).returncode == code
    assert models(machine.workspace / "windows") == before


@STATES
def test_the_container(machine: Machine, state: str, code: int) -> None:
    exported(machine, state)
    machine.add_tool("docker", 'while [ "$1" != sh ]; do shift; done; exec "$@"')
    done = machine.run_script(block("container"), ONNXKVRENAME=PACKAGE)
    assert done.returncode == code, done.stderr


def test_the_constraints_are_those_of_the_cache_and_of_pip(machine: Machine) -> None:
    freeze = 'test "$1 $2 $3" = "freeze --exclude onnxkvrename" && echo onnx==1.0'
    pip = machine.add_tool("pip", f'test "$1" = install || {{ {freeze}; }}')
    machine.add_tool("python3", f'mkdir -p "$3/bin" && cp "{pip}" "$3/bin/"')
    done = machine.run_script(block("constraints"), shell="sh -e", ONNXKVRENAME=PACKAGE)
    assert done.returncode == 0, done.stderr
    assert (machine.workspace / "constraints.txt").read_text("utf-8") == "onnx==1.0\n"
    (job,) = yaml.safe_load(block("github-cache"))["jobs"].values()
    _, python, action = (step["with"] for step in job["steps"])
    assert job["env"] == {"PIP_CONSTRAINT": "constraints.txt"}
    assert (python["cache"], python["cache-dependency-path"]) == ("pip", "constraints.txt")
    (plain,) = yaml.safe_load(block("github-action"))["jobs"].values()
    assert action == plain["steps"][-1]["with"]


def test_the_table_of_systems_is_that_of_the_workflow() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    checks, tests = workflow["jobs"]["all-checks"], workflow["jobs"]["tests"]
    (python,) = (step["with"] for step in checks["steps"] if "python" in step.get("uses", ""))
    matrix = tests["strategy"]["matrix"]
    ran = {(system, version) for system in matrix["os"] for version in matrix["python"]}
    ran |= {(each["os"], each["python"]) for each in matrix["include"]}
    ran |= {(checks["runs-on"], python["python-version"])}
    may_fail = "matrix.os != 'ubuntu-latest' || matrix.python == '3.15'"
    assert tests["continue-on-error"] == f"${{{{ {may_fail} }}}}"
    wanted = {
        (system, version, "no" if system != "ubuntu-latest" or version == "3.15" else "yes")
        for system, version in ran
    }
    names = {"Linux": "ubuntu-latest", "macOS": "macos-latest", "Windows": "windows-latest"}
    rows = re.findall(r"^\| (Linux|macOS|Windows) \| (.*) \| (yes|no) \|$", TEXT, re.MULTILINE)
    told = {
        (names[name], version, stops) for name, all_, stops in rows for version in all_.split(", ")
    }
    assert told == wanted


HOOKS = ROOT / ".pre-commit-hooks.yaml"


@pytest.mark.parametrize(
    ("state", "code", "more"),
    thin([(*case, more) for more in ((), ("--check",)) for case in reversed(CASES)], 2),
)
def test_the_hook_for_pre_commit(
    machine: Machine, state: str, code: int, more: tuple[str, ...]
) -> None:
    """pre-commit calls a hook's entry with a user's arguments, which replace those of the hook."""
    before = models(exported(machine, state))
    installed(machine)
    (hook,) = yaml.safe_load(HOOKS.read_text("utf-8"))
    ((used,),) = [repo["hooks"] for repo in yaml.safe_load(block("pre-commit-hook"))["repos"]]
    assert used["id"] == hook["id"]
    assert not hook["pass_filenames"]
    script = shlex.join([*shlex.split(hook["entry"]), *used["args"], *more])
    assert machine.run_script(script, shell="bash -e").returncode == code
    assert models(machine.workspace / "windows") == before


@pytest.mark.full
@STATES
def test_pre_commit_itself_changes_no_model(machine: Machine, state: str, code: int) -> None:
    """Only the language differs from the hook: no package is built for the test."""
    if not (found := shutil.which("pre-commit")):
        pytest.skip("pre-commit is not installed")
    before = models(exported(machine, state))
    installed(machine)
    config = yaml.safe_load(block("pre-commit-hook"))
    config["repos"][0] |= {"repo": str(machine.temp / "hooks"), "rev": "HEAD"}
    hooks = HOOKS.read_text("utf-8").replace("language: python", "language: system")
    for place, name, text in (
        (machine.temp / "hooks", HOOKS.name, hooks),
        (machine.workspace, ".pre-commit-config.yaml", yaml.safe_dump(config)),
    ):
        place.mkdir(exist_ok=True)
        (place / name).write_text(text, "utf-8")
        commit = "git init -q && git add . && git -c user.name=a -c user.email=a@b commit -qm a"
        assert machine.run_script(f"cd '{place}' && {commit}").returncode == 0
    done = machine.run_script(f"'{found}' run --all-files", shell="bash -e")
    assert done.returncode == code, done.stdout + done.stderr
    assert ("names lack" in done.stdout) == bool(code)
    assert models(machine.workspace / "windows") == before


@STATES
def test_the_workflow_by_hand(machine: Machine, state: str, code: int) -> None:
    exported(machine, state)
    (job,) = yaml.safe_load(block("github"))["jobs"].values()
    (script,) = (step["run"] for step in job["steps"] if "run" in step)
    done = machine.run_script(script, shell="bash -e", ONNXKVRENAME=PACKAGE)
    assert done.returncode == code, done.stderr
    assert done.stdout.count("::error ") == (3 if code else 0)
    assert "::notice title=total::3 models: " in done.stdout


@STATES
def test_the_gitlab_job(machine: Machine, state: str, code: int) -> None:
    exported(machine, state)
    (job,) = yaml.safe_load(block("gitlab")).values()
    done = machine.run_script("\n".join(job["script"]), shell="bash -e", ONNXKVRENAME=PACKAGE)
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize(
    ("shell", "state", "code"),
    thin(((shell, *state) for shell in SHELLS for state in CASES), 2),
)
def test_the_step_for_any_other_system(machine: Machine, shell: str, state: str, code: int) -> None:
    exported(machine, state)
    done = machine.run_script(
        block("shell"), shell=shell, ONNXKVRENAME=PACKAGE, TMPDIR=str(machine.temp)
    )
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize("name", thin(["github", "gitlab", "shell"], 1))
def test_what_cannot_be_installed_fails_the_step(machine: Machine, name: str) -> None:
    exported(machine, "renamed")
    script = block(name)
    if name != "shell":
        (job,) = (yaml.safe_load(script).get("jobs") or yaml.safe_load(script)).values()
        script = "\n".join(job["script"] if "script" in job else [job["steps"][-1]["run"]])
    shell = "sh" if name == "shell" else "bash -e"
    done = machine.run_script(script, shell=shell, ONNXKVRENAME="other", TMPDIR=str(machine.temp))
    assert done.returncode == 1
    assert "not found" not in done.stderr


@STATES
def test_the_document_to_keep(machine: Machine, state: str, code: int) -> None:
    exported(machine, state)
    installed(machine)
    done = machine.run_script(block("json"))
    kept = yaml.safe_load((machine.workspace / "kv-names.json").read_text("utf-8"))
    assert (done.returncode, kept["exit_code"], len(kept["models"])) == (code, code, 3)


@STATES
def test_the_hook_before_a_commit(machine: Machine, state: str, code: int) -> None:
    windows = exported(machine, state)
    installed(machine)
    (repo,) = yaml.safe_load(block("pre-commit"))["repos"]
    (hook,) = repo["hooks"]
    assert machine.run_script(shlex.join(shlex.split(hook["entry"]))).returncode == code
    matching = [path for path in models(windows) if re.search(hook["files"], path)]
    assert len(matching) == 3


def batch(machine: Machine, *args: str, **env: str) -> tuple[int, str]:
    """The batch script, as the cluster runs it."""
    if not (machine.tools / "onnxkvrename").exists():
        installed(machine)
    done = machine.run_script(block("batch"), *args, **env)
    return done.returncode, done.stderr


@pytest.mark.parametrize("cores", thin(["2", "1"], 1))
def test_the_batch_script_renames_the_windows_and_may_run_again(
    machine: Machine, cores: str, snapshot: Snapshot
) -> None:
    windows = exported(machine)
    assert batch(machine, "windows/", "VLLM", SLURM_CPUS_PER_TASK=cores)[0] == 0
    assert models(windows) == models(FIXTURES / "VLLM" / "windows")
    before = snapshot(windows)
    assert batch(machine, "windows/", "VLLM", SLURM_CPUS_PER_TASK=cores)[0] == 0
    assert snapshot(windows) == before


def test_the_batch_script_ends_what_a_killed_one_has_begun(machine: Machine) -> None:
    windows = exported(machine)
    first = "layer_0_1/Tiny_layer_tmp_0_1.onnx"
    shutil.copyfile(FIXTURES / "VLLM" / "windows" / first, windows / first)
    assert batch(machine, "windows/", "VLLM")[0] == 0
    assert models(windows) == models(FIXTURES / "VLLM" / "windows")


def test_the_batch_script_stops_at_a_finding(machine: Machine, snapshot: Snapshot) -> None:
    windows = exported(machine)
    shutil.rmtree(windows / "layer_1_2")
    before = snapshot(windows)
    code, said = batch(machine, "windows/", "VLLM")
    assert (code, "KV302" in said) == (1, True)
    assert snapshot(windows) == before


@pytest.mark.parametrize(
    ("codes", "calls"), thin([("2 0", 1), ("137 0", 1), ("0 1", 2), ("0 0", 2)], 2)
)
def test_the_batch_script_ends_as_its_first_failure(
    machine: Machine, codes: str, calls: int
) -> None:
    (machine.temp / "codes").write_text(codes.replace(" ", "\n"), "utf-8")
    answer = 'exit "$(sed -n "$(wc -l < calls)p" "$RUNNER_TEMP/codes")"'
    machine.add_tool("onnxkvrename", f'echo "$@" >> calls; {answer}')
    assert batch(machine, "windows", "VLLM")[0] == int(codes.split()[calls - 1])
    called = (machine.workspace / "calls").read_text("utf-8").splitlines()
    assert ["--check" in call for call in called] == [False, True][:calls]


@pytest.mark.parametrize(
    ("args", "said"),
    thin(
        [
            (("nowhere", "VLLM"), "nowhere: no such file"),
            (("-x", "VLLM"), "-x: no such file"),
            ((), "is a variable not set?"),
            (("windows",), "the token '' is empty"),
        ],
        2,
    ),
)
def test_the_batch_script_says_what_could_not_be_done(
    machine: Machine, args: tuple[str, ...], said: str
) -> None:
    windows = exported(machine)
    code, err = batch(machine, *args)
    assert (code, said in err) == (2, True)
    assert models(windows) == models(FIXTURES / "plain" / "windows")


def test_a_task_with_some_windows_of_a_set_is_refused(machine: Machine) -> None:
    exported(machine)
    installed(machine)
    shutil.rmtree(machine.workspace / "windows" / "layer_1_2")
    call = "onnxkvrename --prefix VLLM windows/layer_0_1 windows/layer_2_3"
    assert machine.run_script(call).returncode == 1


def test_the_table_of_inputs_is_the_actions() -> None:
    rows = re.findall(r"^\| `(\S+)` \| .* \| (?:`(\w+)`)? ?\|$", TEXT, re.MULTILINE)
    assert rows
    assert rows == [(name, how.get("default", "")) for name, how in ACTION["inputs"].items()]


def test_every_link_leads_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    assert links
    files = [link.partition("#")[0] for link in links]
    assert [file for file in files if not os.path.exists(ROOT / "docs" / file)] == []

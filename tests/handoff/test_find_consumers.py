"""Consumers are found by their names: a module of the package, or an entry point."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import onnxkvrename
from onnxkvrename.errors import KvRenameError
from onnxkvrename.handoff import consumers
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.find_consumers import list_consumers, load_consumer

ALIKE = "all with the same shape and dtype; rests on names, shapes, dtypes and dataflow"
PACKAGE = Path(onnxkvrename.__file__).parent
PIGEON = '''
"""A consumer that carries whole buffers by hand."""

from onnxkvrename.handoff.consumer import Consumer

CONSUMER = Consumer(
    name="pigeon-post",
    token="pigeon",
    selects_input=lambda name: name.endswith("pigeon"),
    selects_output=lambda name: name.endswith("pigeon_RetainedState"),
    input_name_of=lambda name: name.removesuffix("_RetainedState"),
    sort_key=lambda name: (int(name.partition(".")[2].partition("_")[0]), name),
    transferred_shape=lambda shape, tokens: shape,
    itemsize_of={"FLOAT": 4}.get,
)
'''


CANNOT_TAKE = (
    "{}: vllm-qaic cannot use it; with VLLM_QAIC_USE_LEGACY_SLICING_SPEC=1 it can "
    "(--target vllm-qaic-legacy)\n"
)


def run_command(*args: str | Path, paths: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    """Run ``onnxkvrename`` as a process of its own, with folders that come first on its path."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "onnxkvrename", *map(str, args)]
        if sys.version_info >= (3, 11)
        else [sys.executable, "-m", "onnxkvrename", *map(str, args)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, PACKAGE.parent)))},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def program_with_pigeon(tmp_path: Path) -> Path:
    """A copy of the program with one file more."""
    copy = tmp_path / "program"
    shutil.copytree(PACKAGE, copy / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    consumers = copy / PACKAGE.name / "handoff" / "consumers"
    (consumers / "pigeon_post.py").write_text(PIGEON, "utf-8")
    return copy


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    """A folder for :func:`install_plugin`."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    return folder


def install_plugin(
    folder: Path, entry: str, module: str = PIGEON, project: str = "pigeons"
) -> None:
    """Install a distribution with one module and one entry point into a folder."""
    info = folder / f"{project}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[onnxkvrename.consumers]\n{entry}\n", "utf-8")
    (folder / f"{project}.py").write_text(module, "utf-8")


def read_choices(page: str) -> list[str]:
    """Read the consumers in a help page, which may wrap a name at a hyphen."""
    return "".join(page.split()).partition("oneof:")[2].partition(".")[0].split(",")


def test_vllm_qaic_is_built_in() -> None:
    assert "vllm-qaic" in list_consumers()
    assert load_consumer("vllm-qaic").token == "vllmKvCache"


def test_the_example_in_the_package_is_a_consumer() -> None:
    example = textwrap.dedent((consumers.__doc__ or "").partition("::\n")[2])
    module: dict[str, Any] = {}
    exec(example, module)
    assert isinstance(module["CONSUMER"], Consumer)
    assert module["CONSUMER"].sort_key("past_key.3_pigeon") == (3, "past_key.3_pigeon")


def test_every_target_is_called_like_its_module() -> None:
    assert all(load_consumer(name).name == name for name in list_consumers())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("vllm_qaic", "did you mean vllm-qaic?"),
        ("x", f"targets: {', '.join(list_consumers())}"),
        ("", "targets: "),
    ],
)
def test_a_name_that_is_none_is_refused(name: str, hint: str) -> None:
    with pytest.raises(KvRenameError, match="no such target: ") as raised:
        load_consumer(name)
    assert hint in str(raised.value)


def test_another_consumer_is_one_file(decoder: Path, program_with_pigeon: Path) -> None:
    paths = (program_with_pigeon,)
    renamed = run_command(decoder, "--target", "pigeon-post", "-q", paths=paths)
    assert (renamed.returncode, renamed.stdout, renamed.stderr) == (0, "", "")
    checked = run_command("check-consumer", decoder, "--target", "pigeon-post", paths=paths)
    assert checked.stderr == ""
    assert checked.stdout == f"{decoder}: pigeon-post can use it: 4 buffers, layers 0-1, {ALIKE}\n"
    compared = run_command("compare", decoder, decoder, "--target", "pigeon-post", paths=paths)
    assert compared.stdout.startswith("hand-off works: 4 buffers of layers 0-1")


def test_what_goes_for_all_consumers_goes_for_it(decoder: Path, program_with_pigeon: Path) -> None:
    outcome = run_command(
        "check-consumer", decoder, "--target", "pigeon-post", paths=(program_with_pigeon,)
    )
    assert outcome.returncode == 1
    assert (
        "error KV601: 8 names (first: past_key.0) do not carry the token pigeon" in outcome.stderr
    )
    assert "KV604" not in outcome.stderr


def test_another_consumer_changes_no_default(decoder: Path, program_with_pigeon: Path) -> None:
    paths = (program_with_pigeon,)
    checked = run_command("check-consumer", decoder, paths=paths)
    assert checked.stdout == CANNOT_TAKE.format(decoder)
    compared = run_command("compare", decoder, decoder, "--format", "json", paths=paths)
    assert '"target": "vllm-qaic"' in compared.stdout
    for command in ("check-consumer", "compare"):
        page = run_command(command, "--help", paths=paths).stdout
        assert read_choices(page) == sorted((*list_consumers(), "pigeon-post"))
        assert "[default:vllm-qaic]" in "".join(page.split())


def test_a_plugin_is_found_by_its_entry_point(decoder: Path, plugins: Path) -> None:
    install_plugin(plugins, "pigeon-post = pigeons:CONSUMER")
    renamed = run_command(decoder, "--target", "pigeon-post", "-q", paths=(plugins,))
    assert (renamed.returncode, renamed.stdout, renamed.stderr) == (0, "", "")
    checked = run_command("check-consumer", decoder, "--target", "pigeon-post", paths=(plugins,))
    assert checked.stderr == ""
    assert checked.stdout == f"{decoder}: pigeon-post can use it: 4 buffers, layers 0-1, {ALIKE}\n"


@pytest.mark.parametrize("name", ["vllm-qaic", "vllm_qaic"])
def test_a_plugin_cannot_hide_a_built_in_consumer(name: str, decoder: Path, plugins: Path) -> None:
    install_plugin(plugins, f"{name} = pigeons:CONSUMER", PIGEON.replace("pigeon-post", name))
    checked = run_command("check-consumer", decoder, "--target", "vllm-qaic", paths=(plugins,))
    assert "do not carry the token vllmKvCache" in checked.stderr
    page = run_command("check-consumer", "--help", paths=(plugins,)).stdout
    assert read_choices(page) == list(list_consumers())


@pytest.mark.parametrize(
    ("entry", "module", "problem"),
    [
        ("pigeon-post = pigeons:CONSUMER", "import no_such", "No module named 'no_such'"),
        ("pigeon-post = pigeons:OTHER", PIGEON, "has no attribute 'OTHER'"),
        (
            "pigeon-post = pigeons:CONSUMER",
            "CONSUMER = 7",
            "pigeons:CONSUMER is of type int, not Consumer",
        ),
        ("pigeon-post = pigeons", PIGEON, "pigeons is of type module, not Consumer"),
        ("pigeon-post = ", PIGEON, "cannot be used: "),
        ("pigeon-post = pigeons:CONSUMER", "1 / 0", "ZeroDivisionError: division by zero"),
        (
            "pigeon-post = pigeons:CONSUMER",
            PIGEON.replace("pigeon-post", "owl-post"),
            "its consumer is named owl-post",
        ),
    ],
)
def test_a_broken_plugin_fails_only_when_it_is_asked_for(
    entry: str, module: str, problem: str, decoder: Path, plugins: Path
) -> None:
    install_plugin(plugins, entry, module)
    failed = run_command("check-consumer", decoder, "--target", "pigeon-post", paths=(plugins,))
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.count("\n") == 1
    source = "the plug-in pigeon-post of pigeons (onnxkvrename.consumers)"
    assert f"{source} cannot be used: " in failed.stderr
    assert problem in failed.stderr
    assert "update or uninstall pigeons" in failed.stderr
    other = run_command("check-consumer", decoder, paths=(plugins,))
    assert other.stdout == CANNOT_TAKE.format(decoder)


def test_two_plugins_with_one_name_are_both_named(decoder: Path, plugins: Path) -> None:
    install_plugin(plugins, "pigeon-post = pigeons:CONSUMER")
    install_plugin(plugins, "pigeon-post = owls:CONSUMER", project="owls")
    failed = run_command("check-consumer", decoder, "--target", "pigeon-post", paths=(plugins,))
    assert failed.returncode == 2
    assert "are named pigeon-post: owls and pigeons (uninstall all but one)" in failed.stderr
    other = run_command("check-consumer", decoder, paths=(plugins,))
    assert other.stdout == CANNOT_TAKE.format(decoder)
    page = run_command("check-consumer", "--help", paths=(plugins,)).stdout
    assert read_choices(page) == sorted((*list_consumers(), "pigeon-post"))


@pytest.mark.parametrize("command", ["check-consumer", "compare"])
def test_a_built_in_consumer_does_not_look_at_distributions(command: str, decoder: Path) -> None:
    script = (
        "import sys, importlib.metadata as metadata; looks = [];"
        "metadata.entry_points = metadata.distributions = lambda **_: looks.append(1) or ();"
        "from onnxkvrename.cli.main import main; main(sys.argv[1:]); sys.exit(bool(looks))"
    )
    models = [decoder] if command == "check-consumer" else [decoder, decoder]
    process = subprocess.run([sys.executable, "-c", script, command, *map(str, models)])
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('name.endswith("pigeon")', "exit(0)", "SystemExit: 0"),
        ('name.removesuffix("_RetainedState")', "1 / 0", "ZeroDivisionError: division by zero"),
        ("(int(", "(abs(", "TypeError: bad operand type for abs()"),
        ("\n)", "\n    checks=(lambda layout, full: iter([next(iter(()))]),),\n)", "StopIteration"),
        ("shape, tokens: shape", "shape, tokens: exit(0)", "SystemExit: 0"),
    ],
)
def test_a_function_of_a_plugin_that_raises_is_the_plugin_s_error(
    old: str, new: str, problem: str, decoder: Path, plugins: Path
) -> None:
    install_plugin(plugins, "pigeon-post = pigeons:CONSUMER", PIGEON.replace(old, new))
    assert PIGEON.replace(old, new) != PIGEON
    renamed = decoder.with_name("renamed.onnx")
    call = (decoder, "-o", renamed, "--prefix", "pigeon", "-q")
    assert run_command(*call, paths=(plugins,)).returncode == 0
    failed = run_command("compare", renamed, renamed, "--target", "pigeon-post", paths=(plugins,))
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.count("\n") == 1
    source = "the plug-in pigeon-post of pigeons (onnxkvrename.consumers)"
    assert f"{source} cannot be used: {problem}" in failed.stderr


def test_a_plugin_may_read_its_token_from_a_file_beside_the_model(
    decoder: Path, plugins: Path
) -> None:
    module = PIGEON.replace(
        "\n)", "\n    configure=lambda layout: read(layout),\n)"
    ) + textwrap.dedent(
        """
        from pathlib import Path

        def read(layout):
            token = Path(layout.models[0]).with_name("token.txt").read_text()
            return CONSUMER._replace(
                token=token,
                selects_input=lambda name: name.endswith(token),
                selects_output=lambda name: name.endswith(f"{token}_RetainedState"),
            )
        """
    )
    install_plugin(plugins, "pigeon-post = pigeons:CONSUMER", module)
    call = ("check-consumer", decoder, "--target", "pigeon-post")
    failed = run_command(*call, paths=(plugins,))
    assert failed.returncode == 2
    assert "the plug-in pigeon-post of pigeons" in failed.stderr
    assert "FileNotFoundError" in failed.stderr
    decoder.with_name("token.txt").write_text("owl")
    assert run_command(decoder, "--prefix", "owl", "-q", paths=(plugins,)).returncode == 0
    taken = run_command(*call, paths=(plugins,))
    assert taken.stdout == f"{decoder}: pigeon-post can use it: 4 buffers, layers 0-1, {ALIKE}\n"
    compared = run_command("compare", decoder, decoder, *call[2:], paths=(plugins,))
    assert compared.stdout.startswith("hand-off works: 4 buffers of layers 0-1")

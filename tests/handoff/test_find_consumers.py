"""Consumers are found by their names: a module of the package, or an entry point."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, Spawn

from onnxkvrename.errors import KvRenameError
from onnxkvrename.handoff import consumers
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.find_consumers import list_consumers, load_consumer
from onnxkvrename.rules import plugins

ALIKE = "all with the same shape and dtype; based on names, shapes, dtypes and dataflow"
Install = Callable[..., None]
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


@pytest.fixture
def built_in_pigeon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of consumers, with one file more."""
    (tmp_path / "consumers").mkdir()
    (tmp_path / "consumers" / "pigeon_post.py").write_text(PIGEON, "utf-8")
    monkeypatch.setattr(consumers, "__path__", [*consumers.__path__, str(tmp_path / "consumers")])
    monkeypatch.delitem(sys.modules, f"{consumers.__name__}.pigeon_post", raising=False)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a distribution with one module and one entry point."""
    folder = tmp_path / "plugins"
    monkeypatch.syspath_prepend(folder)

    def install_plugin(entry: str, module: str = PIGEON, project: str = "pigeons") -> None:
        info = folder / f"{project}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[onnxkvrename.consumers]\n{entry}\n", "utf-8")
        (folder / f"{project}.py").write_text(module, "utf-8")
        monkeypatch.delitem(sys.modules, project, raising=False)

    return install_plugin


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


@pytest.mark.usefixtures("built_in_pigeon")
def test_another_consumer_is_one_file(decoder: Path, run: Run) -> None:
    assert run(decoder, "--target", "pigeon-post", "-q") == (0, "", "")
    checked = run("check-consumer", decoder, "--target", "pigeon-post")
    assert checked == (
        0,
        f"{decoder}: pigeon-post can use it: 4 buffers, layers 0-1, {ALIKE}\n",
        "",
    )
    compared = run("compare", decoder, decoder, "--target", "pigeon-post")
    assert "works" in compared.out


@pytest.mark.usefixtures("built_in_pigeon")
def test_what_goes_for_all_consumers_goes_for_it(decoder: Path, run: Run) -> None:
    outcome = run("check-consumer", decoder, "--target", "pigeon-post")
    assert outcome.code == 1
    assert "error KV601: 8 names (first: past_key.0) do not carry the token pigeon" in outcome.err
    assert "KV604" not in outcome.err


@pytest.mark.usefixtures("built_in_pigeon")
def test_another_consumer_changes_no_default(decoder: Path, run: Run) -> None:
    assert "pigeon-post" in list_consumers()
    assert run("check-consumer", decoder).out == CANNOT_TAKE.format(decoder)
    compared = run("compare", decoder, decoder, "--format", "json")
    assert '"target": "vllm-qaic"' in compared.out
    for command in ("check-consumer", "compare"):
        page = run(command, "--help").out
        assert read_choices(page) == list(list_consumers())
        assert "default:vllm-qaic]" in "".join(page.split())


def test_a_plugin_is_found_by_its_entry_point(
    decoder: Path, install: Install, tmp_path: Path, spawn: Spawn
) -> None:
    install("pigeon-post = pigeons:CONSUMER")
    environment = {"PYTHONPATH": str(tmp_path / "plugins")}
    renamed = spawn(decoder, "--target", "pigeon-post", "-q", env=environment)
    assert (renamed.returncode, renamed.stdout, renamed.stderr) == (0, "", "")
    checked = spawn("check-consumer", decoder, "--target", "pigeon-post", env=environment)
    assert checked.stderr == ""
    assert checked.stdout == f"{decoder}: pigeon-post can use it: 4 buffers, layers 0-1, {ALIKE}\n"


@pytest.mark.parametrize("name", ["vllm-qaic", "vllm_qaic"])
def test_a_plugin_cannot_hide_a_built_in_consumer(
    name: str, decoder: Path, install: Install, run: Run
) -> None:
    install(f"{name} = pigeons:CONSUMER", PIGEON.replace("pigeon-post", name))
    checked = run("check-consumer", decoder, "--target", "vllm-qaic")
    assert "do not carry the token vllmKvCache" in checked.err
    page = run("check-consumer", "--help").out
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
    entry: str, module: str, problem: str, decoder: Path, install: Install, run: Run
) -> None:
    install(entry, module)
    failed = run("check-consumer", decoder, "--target", "pigeon-post")
    assert (failed.code, failed.out) == (2, "")
    assert failed.err.count("\n") == 1
    source = "the plug-in pigeon-post of pigeons (onnxkvrename.consumers)"
    assert f"{source} cannot be used: " in failed.err
    assert problem in failed.err
    assert "update or uninstall pigeons" in failed.err
    other = run("check-consumer", decoder)
    assert other.out == CANNOT_TAKE.format(decoder)


def test_two_plugins_with_one_name_are_both_named(
    decoder: Path, install: Install, run: Run
) -> None:
    install("pigeon-post = pigeons:CONSUMER")
    install("pigeon-post = owls:CONSUMER", project="owls")
    failed = run("check-consumer", decoder, "--target", "pigeon-post")
    assert failed.code == 2
    assert "are named pigeon-post: owls and pigeons (uninstall all but one)" in failed.err
    other = run("check-consumer", decoder)
    assert other.out == CANNOT_TAKE.format(decoder)
    page = run("check-consumer", "--help").out
    assert read_choices(page) == list(list_consumers())
    assert list_consumers().count("pigeon-post") == 1


@pytest.mark.parametrize("command", ["check-consumer", "compare"])
def test_a_built_in_consumer_does_not_look_at_distributions(
    command: str, decoder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "distributions", lambda: pytest.fail("they are looked at"))
    assert run(command, decoder, *[decoder] * (command == "compare")).code == 1


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('name.endswith("pigeon")', "exit(0)", "SystemExit: 0"),
        ('name.removesuffix("_RetainedState")', "1 / 0", "ZeroDivisionError: division by zero"),
        ("(int(", "(abs(", "TypeError: bad operand type for abs()"),
        ("\n)", "\n    checks=(lambda view: iter([next(iter(()))]),),\n)", "StopIteration"),
        ("shape, tokens: shape", "shape, tokens: exit(0)", "SystemExit: 0"),
    ],
)
def test_a_function_of_a_plugin_that_raises_is_the_plugin_s_error(
    old: str, new: str, problem: str, decoder: Path, install: Install, run: Run
) -> None:
    install("pigeon-post = pigeons:CONSUMER", PIGEON.replace(old, new))
    assert PIGEON.replace(old, new) != PIGEON
    renamed = decoder.with_name("renamed.onnx")
    call = (decoder, "-o", renamed, "--prefix", "pigeon", "-q")
    assert run(*call).code == 0
    failed = run("compare", renamed, renamed, "--target", "pigeon-post")
    assert (failed.code, failed.out) == (2, "")
    assert failed.err.count("\n") == 1
    source = "the plug-in pigeon-post of pigeons (onnxkvrename.consumers)"
    assert f"{source} cannot be used: {problem}" in failed.err


def test_a_plugin_may_read_its_token_from_a_file_beside_the_model(
    decoder: Path, install: Install, run: Run
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
    install("pigeon-post = pigeons:CONSUMER", module)
    call = ("check-consumer", decoder, "--target", "pigeon-post")
    failed = run(*call)
    assert failed.code == 2
    assert "the plug-in pigeon-post of pigeons" in failed.err
    assert "FileNotFoundError" in failed.err
    decoder.with_name("token.txt").write_text("owl")
    assert run(decoder, "--prefix", "owl", "-q").code == 0
    taken = run(*call)
    assert "pigeon-post can use it: 4 buffers" in taken.out
    compared = run("compare", decoder, decoder, *call[2:])
    assert "works" in compared.out

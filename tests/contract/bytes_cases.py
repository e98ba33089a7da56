"""The cases of ``bytes.sha256``: what is done, and the SHA-256 of each file that results.

Every fixture and every real export, as one model and as a directory, is renamed in each way that
writes. Nothing here reads a message: only the files count, and the exit code where there are none.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from contract.matrix import Source, list_sources
from contract.observe import REPOSITORY, ROOTS, call, enter, prepare

BYTES = Path(__file__).with_name("bytes.sha256")
GROUPS = {"fixtures": REPOSITORY / "fixtures", **ROOTS}
COPIED_NAMES = (
    "custom_io.yaml",
    "genai_config.json",
    "hashed_export_params.json",
    "inference_metadata.yaml",
)
"""What is copied of an export, besides its models and their external data."""
CONFIGURATIONS = ("genai_config.json", "inference_metadata.yaml")
PARAMS = "hashed_export_params.json"
UNKNOWN = (
    "dynamo",
    "new/no-cache",
    "new/rwkv4",
    "new/sherpa-zipformer2",
    "new/silero-vad",
    "new/tf2onnx-decoder",
    "new/tf2onnx-lstmcell",
)
"""Exports whose names no built-in profile knows."""
RENAME = "{} --prefix VLLM"
STRIP = "{} --strip"
REPLACE = "{} --prefix vllmKvCache --replace"


class Case(NamedTuple):
    """What is done.

    Attributes:
        name: Source and action, which name the row.
        given: Lines as in a row of the contract.
        commands: Command lines of onnxkvrename, one after the other.
        is_undone: Whether the commands rename files and strip them again.
    """

    name: str
    given: tuple[str, ...]
    commands: tuple[str, ...]
    is_undone: bool = False

    @property
    def group(self) -> str:
        """The directory that its models come from."""
        return self.name.partition("/")[0]

    @property
    def source(self) -> str:
        """Where its models come from."""
        return self.name.rpartition(" ")[0]


class Result(NamedTuple):
    """What came of a case.

    Attributes:
        lines: A line for each file, as ``sha256sum`` writes it, or one with the exit code.
        not_restored: Files that were renamed and stripped, and are not what they were.
    """

    lines: list[str]
    not_restored: list[str]


def list_absent() -> list[str]:
    """List the groups that this machine lacks."""
    return [group for group, root in GROUPS.items() if not root.is_dir()]


def read_rows() -> dict[str, list[str]]:
    """Read the recorded lines of each row."""
    rows: dict[str, list[str]] = {}
    for line in BYTES.read_text(encoding="utf-8").splitlines():
        # Two spaces, as sha256sum writes, then the row, and the file where there is one.
        name = line.partition("  ")[2].partition(": ")[0]
        rows.setdefault(name, []).append(line)
    return rows


def write_rows(rows: dict[str, list[str]]) -> None:
    """Write the lines of each row, sorted by row."""
    lines = [line for name in sorted(rows) for line in rows[name]]
    BYTES.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def list_cases() -> list[Case]:
    """List the cases whose files are there."""
    cases = [*_write_sidecars(), *_write_caches()]
    if GROUPS["exports"].is_dir():
        cases += [*_rename_beside_a_compile(), *_rename_dual_exports()]
    for group, root in GROUPS.items():
        if root.is_dir():
            for source in [*list_sources(group, root), *_list_more_folders(group, root)]:
                cases += _rename_source(group, root, source)
    names = [case.name for case in cases]
    if len(set(names)) < len(names):
        raise ValueError(f"two cases have one name: {sorted(names)}")
    return cases


def run_case(case: Case, directory: Path) -> Result:
    """Do what a case says below a new directory."""
    work = directory / "work"
    work.mkdir(parents=True)
    code = 0
    touched: set[str] = set()
    with enter(work, {}):
        for line in case.given:
            prepare(line)
        before = now = _hash_files()
        for command in case.commands:
            code = call(shlex.split(command)).code
            last, now = now, _hash_files()
            touched |= {name for name in last | now if last.get(name) != now.get(name)}
    if not touched:
        return Result([f"exit-{code}  {case.name}"], [])
    lines = [f"{now.get(name, 'gone')}  {case.name}: {name}" for name in sorted(touched)]
    changed = [name for name in sorted(touched) if now.get(name) != before.get(name)]
    return Result(lines, changed if case.is_undone else [])


def _hash_files() -> dict[str, str]:
    """Return the SHA-256 of each file here that is not hidden."""
    return {
        path.as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path().rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.parts)
    }


# ---- models and directories ----


def _list_more_folders(group: str, root: Path) -> Iterator[Source]:
    """List the directories with several models below, those of several exports excepted."""
    listed = {source.path for source in list_sources(group, root)}
    for folder in sorted(path for path in root.rglob("*") if path.is_dir()):
        path = folder.relative_to(root)
        is_one_export = group == "fixtures" or len(path.parts) > 1
        if path not in listed and is_one_export and len(list(folder.rglob("*.onnx"))) > 1:
            yield Source(path, path, Path(path.name))


def _copy_files(group: str, root: Path, source: Source) -> tuple[str, ...]:
    """Copy a model or a directory, without the files that no command reads."""
    start = root / source.copied
    files = [start] if start.is_file() else sorted(start.rglob("*"))
    prefix = "" if group == "fixtures" else f"{group}/"
    return tuple(
        f"copy {prefix}{path.relative_to(root).as_posix()} "
        f"{path.relative_to(start.parent).as_posix()}"
        for path in files
        if path.suffix in (".onnx", ".data") or path.name in COPIED_NAMES
    )


def _rename_source(group: str, root: Path, source: Source) -> Iterator[Case]:
    """Build the cases of a model or a directory of models."""
    given = _copy_files(group, root, source)
    found = root / source.path
    target = source.target.as_posix()
    is_model = found.is_file()
    has_token = any(part.startswith("VLLM") for part in source.path.parts)

    is_in_cache = any(line.endswith(PARAMS) for line in given)

    def build(action: str, *commands: str, is_undone: bool = False) -> Case:
        filled = tuple(command.format(target) for command in commands)
        if is_in_cache:
            filled = tuple(map(_force_in_place, filled))
        return Case(f"{group}/{source.path.as_posix()} {action}", given, filled, is_undone)

    yield build("in-place", RENAME)
    if is_model:
        yield build("output", f"{RENAME} -o out/{source.path.name}")
    # With -d a folder with a configuration goes along whole: record its models alone.
    folder = root / source.copied
    is_in_folder = any((folder / name).is_file() for name in CONFIGURATIONS)
    if not (is_model and is_in_folder and len(list(folder.rglob("*.onnx"))) > 1):
        yield build("directory", f"{RENAME} -d out")
    if has_token:
        yield build("strip", STRIP)
        yield build("replace", REPLACE)
    else:
        yield build("undone", RENAME, STRIP, is_undone=True)
        yield build("replace", RENAME, REPLACE)
    models = [found] if is_model else sorted(found.rglob("*.onnx"))
    if any(b"_InternalRetainedState" in model.read_bytes() for model in models):
        yield build("normalize", f"{RENAME} --normalize")
        yield build("normalize-later", RENAME, f"{RENAME} --normalize")
    if not is_model:
        first = (source.target / models[0].relative_to(found)).as_posix()
        rest = STRIP if has_token else RENAME
        yield build("completed", rest.replace("{}", first), rest)
    if (folder / PARAMS).is_file():
        seeded = (source.target.parent if is_model else source.target).as_posix()
        change = STRIP if has_token else RENAME
        yield build("seed-cache", change.replace("{}", seeded) + " --seed-cache")
    if is_model and group != "fixtures" and source.path.as_posix().startswith(UNKNOWN):
        yield build("pairs", "pairs {} --as rules")
        rules = (*given, f"save rules.toml pairs {target} --as rules")
        ways = {"rules-output": f" -o out/{source.path.name}", "rules-undone": ""}
        for action, option in ways.items():
            case = build(
                action,
                f"{RENAME} --rules rules.toml{option}",
                *([] if option else [f"{STRIP} --rules rules.toml"]),
                is_undone=not option,
            )
            yield case._replace(given=rules)


def _force_in_place(command: str) -> str:
    """Let a command that renames in place do so in QEfficient's cache as well."""
    is_elsewhere = not {"-o", "-d", "--seed-cache", "pairs"}.isdisjoint(command.split())
    return command if is_elsewhere else f"{command} --force"


# ---- QEfficient's cache ----


def _write_caches() -> Iterator[Case]:
    """Build the cases of exports in QEfficient's cache."""
    exports = {
        "external": "export external cache",
        "decoder": "export decoder.onnx cache",
        "mla": "export mla.onnx cache",
        "functions": "export functions.onnx cache",
    }
    for name, line in exports.items():
        yield _seed(name, (line,), RENAME)
        yield _seed(f"{name}-VLLM", (f"{line} VLLM",), STRIP)
    parts = ("encoder.onnx cache '' QEffVisionEncoder", "decoder.onnx cache '' QEffCausalLM")
    both = tuple(f"export vlm_dual/{part}ForTextImageToTextModel" for part in parts)
    yield _seed("vlm_dual", both, RENAME)
    yield _seed("several", (exports["decoder"], exports["mla"]), RENAME)


def _seed(name: str, given: tuple[str, ...], command: str) -> Case:
    return Case(
        f"fixtures/cache-{name} seed-cache", given, (f"{command.format('cache')} --seed-cache",)
    )


# ---- files that repeat the names ----


def _write_sidecars() -> Iterator[Case]:
    """Build the cases of models with files that repeat their names."""
    ends = ("past_key.0", "past_value.0", "past_key.1", "past_value.1")
    qeff = [name for end in ends for name in (end, f"{end}_RetainedState")]
    compiler = _write_compiler_files(qeff)
    hidden = [name.replace("_Retained", "_InternalRetained") for name in qeff]
    genai = {"genai_config.json": _write_genai_config()}
    metadata = {"inference_metadata.yaml": _write_metadata(qeff)}
    inner = ["FP32NodeInstanceNames:", *(f"  - {name}" for name in ("past_key.1", *qeff)), ""]
    yield from _rename_with("compiler", "decoder", compiler)
    yield from _rename_with("functions", "functions", {"node_precision.yaml": "\n".join(inner)})
    yield from _rename_with("vision", "vlm_single", compiler)
    yield from _rename_with("genai", "decoder", genai)
    yield from _rename_with("metadata", "decoder", metadata)
    yield from _rename_with("all", "decoder", compiler | genai | metadata)
    name, files = "internal-suffix", _write_compiler_files(hidden)
    yield from _rename_with(name, "internal_suffix", files)
    given = _give_sidecars("internal_suffix", files, "m")
    yield _rename_texts(name, "normalize", given, f"{RENAME} --normalize")
    named = _give_sidecars("decoder", compiler, "io")
    options = "".join(f" --sidecar io/{file}" for file in compiler)
    yield _rename_texts("named", "in-place", named, RENAME + options)
    yield _rename_texts("named", "undone", named, RENAME + options, STRIP + options, is_undone=True)


def _rename_with(name: str, fixture: str, files: dict[str, str]) -> Iterator[Case]:
    """Build the cases of one model and the files beside it."""
    given = _give_sidecars(fixture, files, "m")
    yield _rename_texts(name, "in-place", given, RENAME)
    yield _rename_texts(name, "output", given, f"{RENAME} -o out/model.onnx")
    yield _rename_texts(name, "directory", given, f"{RENAME} -d out")
    yield _rename_texts(name, "undone", given, RENAME, STRIP, is_undone=True)
    yield _rename_texts(name, "replace", given, RENAME, REPLACE)
    yield _rename_texts(name, "off", given, f"{RENAME} --sidecars off")
    yield _rename_texts(name, "completed", given, f"{RENAME} --sidecars off", RENAME)


def _rename_texts(
    name: str, action: str, given: tuple[str, ...], *commands: str, is_undone: bool = False
) -> Case:
    filled = tuple(command.format("m/model.onnx") for command in commands)
    return Case(f"fixtures/sidecars-{name} {action}", given, filled, is_undone)


def _give_sidecars(fixture: str, files: dict[str, str], directory: str) -> tuple[str, ...]:
    written = (
        f"write {directory}/{name} {shlex.quote(text.replace(chr(10), chr(92) + 'n'))}"
        for name, text in files.items()
    )
    return (f"copy plain/{fixture}.onnx m/model.onnx", *written)


def _write_compiler_files(names: Iterable[str]) -> dict[str, str]:
    """Write what the compiler reads: each name plain, in quotes, or in a list."""
    names = list(names)
    entries = [f" - IOName: {name}\n   Precision: float16\n\n" for name in names]
    quoted = [f" - IOName: '{name}'\n   Precision: \"mxint8\"\n" for name in names]
    batch = [
        {"path": f"{name}.raw", "io-direction": "in", "map-to": name} for name in ["logits", *names]
    ]
    rest = ", ".join(f'"{name}"' for name in names)
    return {
        "custom_io.yaml": "".join(entries),
        "custom_io_int8.yaml": "# in quotes\n" + "".join(quoted),
        "aic_batch_io.json": json.dumps({"IO-files": [batch]}, indent=4),
        "node_precision.yaml": "FP32NodeInstanceNames:\n"
        f"  - {names[-1]}\n  - /layers.0/Add_output_0\nFP16NodeInstanceNames: [{rest}, 109]\n",
    }


def _write_genai_config() -> str:
    """Write a configuration of onnxruntime-genai."""
    inputs, outputs = (
        {f"{side}_{part}_names": f"past_{part}.%d{end}" for part in ("key", "value")}
        for side, end in (("past", ""), ("present", "_RetainedState"))
    )
    decoder = {
        "filename": "model.onnx",
        "inputs": {"input_ids": "input_ids", **inputs},
        "outputs": {"logits": "logits", **outputs},
        "num_hidden_layers": 2,
    }
    return json.dumps({"model": {"decoder": decoder, "type": "llama"}}, indent=4)


def _write_metadata(names: Iterable[str]) -> str:
    """Write metadata as mobius writes them."""
    sides: dict[str, list[str]] = {"inputs": ["input_ids"], "outputs": ["logits"]}
    for name in names:
        sides["outputs" if name.endswith("RetainedState") else "inputs"].append(name)
    lines = ["model:", "  architecture: llama", "  io:"]
    for side, found in sides.items():
        lines.append(f"    {side}:")
        for name in found:
            lines += [f"    - name: {name}", "      dtype: fp32", "      shape: [batch, 2]"]
    return "\n".join([*lines, ""])


def _rename_beside_a_compile() -> Iterator[Case]:
    """Build the cases of a real export beside the custom_io.yaml of its compile."""
    root = GROUPS["exports"] / "llama2l"
    for token, command in (("plain", RENAME), ("VLLM", STRIP)):
        for model in sorted(root.glob(f"{token}-*/*.onnx")):
            given = (
                f"copy exports/llama2l/{model.parent.name}/{model.name} m/{model.name}",
                f"copy exports/llama2l/compile-{token}/custom_io.yaml m/custom_io.yaml",
            )
            target = f"m/{model.name}"
            name = f"exports/llama2l/compile-{token}"
            yield Case(f"{name} in-place", given, (command.format(target),))
            yield Case(f"{name} directory", given, (f"{command.format(target)} -d out",))


def _rename_dual_exports() -> Iterator[Case]:
    """Build the cases of a vision encoder and its decoder, two exports of one command."""
    root = GROUPS["exports"] / "gemma3vlm_dual"
    for token, command in (("plain", RENAME), ("VLLM", STRIP)):
        folders = sorted(path.name for path in root.glob(f"{token}-*"))
        given = tuple(f"copy exports/gemma3vlm_dual/{folder} cache/{folder}" for folder in folders)
        both = command.format(" ".join(f"cache/{folder}" for folder in folders))
        name = f"exports/gemma3vlm_dual/{token}"
        yield Case(f"{name} in-place", given, (f"{both} --force",))
        yield Case(f"{name} directory", given, (f"{both} -d out",))
        yield Case(f"{name} seed-cache", given, (f"{both} --seed-cache",))
        if command == RENAME:
            undo = both.replace(RENAME.partition(" ")[2], "--strip")
            yield Case(f"{name} undone", given, (f"{both} --force", undo), is_undone=True)

"""Write what a model's KV buffers are: a manifest beside it, a stamp into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from onnxkvrename.api.arguments import (
    ModelLike,
    PathLike,
    RulesLike,
    build_request,
    find_rules,
    read_arguments,
    speak_python,
)
from onnxkvrename.api.layouts import load_traced
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.layout.load import CompileInfo, LoadedLayout
from onnxkvrename.layout.manifest import DOCUMENT, describe_layout
from onnxkvrename.rules.profile import Rules
from onnxkvrename.storage.run_files import RunFiles
from onnxkvrename.storage.write_file import needs_write, write_files


@speak_python
def write_manifest(
    paths: ModelLike | Iterable[PathLike],
    output: PathLike,
    *,
    sizes: Mapping[str, int] | None = None,
    specializations: PathLike | None = None,
    custom_io: PathLike | None = None,
    rules: RulesLike = None,
    force: bool = False,
) -> LoadedLayout:
    """Write a manifest, which `load_layout` and `compare` take for its model.

    ``paths``, ``sizes``, ``specializations``, ``custom_io`` and ``rules`` are as for `load_layout`.

    Args:
        output: The file to write, completely or not at all.
        force: Overwrite an existing file.

    Returns:
        What was written: the layout, and what is wrong with the models.

    Raises:
        ModelError: A model cannot be read, or several paths are not one model.
        WriteError: The file exists, is one that is read, or cannot be written.
        KvRenameError: The model has no such symbol.
        RulesError: The rules cannot be used.
        ValueError: A size is less than 1, or a path is empty.
        TypeError: An argument has the wrong type.

    Examples:
        >>> loaded = onnxkvrename.write_manifest("model.onnx", "model.json")
        >>> onnxkvrename.compare("model.json", "model.onnx").failed, loaded.failed
        (True, False)
    """
    arguments = read_arguments(write_manifest, locals())
    compile_info = build_request(CompileInfo, arguments)
    found = find_rules(arguments["profile"], arguments["rules"], arguments["paths"])
    loaded = load_traced(arguments["paths"], found, compile_info)
    content = describe_layout(
        loaded.layout, loaded.reports, vllm=None, profile=found.profile_choice
    )
    text = DOCUMENT.render(content, decide_exit_code(failed=loaded.failed))
    files = {arguments["output"]: f"{text}\n".encode()}
    read = (compile_info.specializations, compile_info.custom_io, arguments["rules"])
    inputs = check_manifest_outputs(loaded, files, read, force=force)
    write_files(files, force=force, inputs=inputs)
    return loaded


def check_manifest_outputs(
    loaded: LoadedLayout,
    contents: Mapping[Path, bytes],
    read: Iterable[Path | Rules | None],
    *,
    force: bool = False,
) -> list[Path]:
    """Check that a manifest can be written; nothing is written yet.

    Args:
        loaded: The layout.
        contents: The file of the manifest, if one is written.
        read: What the manifest is made from, beside the models; all but paths is ignored.
        force: Whether an existing file is replaced.

    Returns:
        The files that are read.

    Raises:
        WriteError: An output cannot be written.
    """
    if not contents:
        return []
    files = RunFiles()
    for data_path in loaded.data_paths:
        files.add_input(data_path, "external data of a model of this run")
    for path in read:
        if isinstance(path, Path):
            files.add_input(path, "what the manifest is made from")
    for report in loaded.reports:
        role = f"the model {report.path}" if loaded.identities else "the manifest that is read"
        files.add_input(Path(report.path), role)
    for result in [files.add_output(output, "the manifest") for output in contents]:
        files.check_output(result)
    for output, content in contents.items():
        needs_write(output, content, force=force)
    return files.list_inputs()

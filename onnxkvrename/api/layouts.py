"""Functions that read the content of a model, and its KV buffers as a consumer sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from onnxkvrename.api.arguments import (
    PathLike,
    RulesLike,
    as_optional_path,
    as_path,
    as_paths,
    as_sizes,
    load_rules_for,
)
from onnxkvrename.layout.inspect import ModelSummary, inspect_model
from onnxkvrename.layout.load import CompileInfo, LoadedLayout, load_model_or_manifest
from onnxkvrename.layout.load import load_layout as load_models
from onnxkvrename.rules.profile import Rules
from onnxkvrename.verification import trace_buffer_scales, trace_buffer_updates


def inspect(model: PathLike, *, rules: RulesLike = None) -> ModelSummary:
    """Return what is in a model file: its KV buffers, tokens, weights and findings.

    Args:
        model: The model's path.
        rules: Rules, a profile's name or the path of a rules file.

    Returns:
        The summary; what is wrong with the model is in its ``findings``.

    Raises:
        ModelError: The model cannot be read.
        RulesError: The rules cannot be used.
        TypeError: An argument has the wrong type.

    Examples:
        >>> summary = onnxkvrename.inspect("model.onnx")
        >>> len(summary.buffers), summary.layers
        (4, (0, 1))
    """
    path = as_path(model, "model")
    summary = inspect_model(path, load_rules_for(rules, [path]), trace_buffer_updates)
    if summary.error is not None:
        raise summary.error
    return summary


def load_layout(
    paths: PathLike | Iterable[PathLike],
    *,
    sizes: Mapping[str, int] | None = None,
    specializations: PathLike | None = None,
    custom_io: PathLike | None = None,
    rules: RulesLike = None,
) -> LoadedLayout:
    """Return the KV buffers of a model, of the windows of one, or of a manifest.

    Args:
        paths: A model, a manifest, a directory with the windows of one model, or several
            such windows.
        sizes: Sizes of symbolic dimensions, such as ``{"ctx_len": 4096}``.
        specializations: A specializations.json with further sizes.
        custom_io: A custom_io.yaml with the dtypes of a compile.
        rules: Rules, a profile's name or the path of a rules file.

    Returns:
        The layout, and what is wrong with the models.

    Raises:
        ModelError: A model cannot be read, or several paths are not one model.
        KvRenameError: The model has no such symbol.
        ValueError: A size is less than 1, or no path is given.
        RulesError: The rules cannot be used.
        TypeError: An argument has the wrong type.

    Examples:
        >>> loaded = onnxkvrename.load_layout("windows", sizes={"ctx_len": 4096})
        >>> [buffer.input for buffer in loaded.layout.buffers if buffer.layer == 2]
        ['past_key.2', 'past_value.2']
    """
    compile_info = CompileInfo(
        sizes=as_sizes(sizes, "sizes"),
        specializations_path=as_optional_path(specializations, "specializations"),
        custom_io_path=as_optional_path(custom_io, "custom_io"),
    )
    models = as_paths(paths, "paths")
    return load_traced(models, load_rules_for(rules, models), compile_info)


def load_traced(
    paths: Sequence[Path],
    rules: Rules,
    compile_info: CompileInfo | None = None,
    *,
    strict: bool = False,
) -> LoadedLayout:
    """Return the layout of models or of a manifest, with what their graphs do with the buffers.

    Args:
        paths: As for :func:`load_layout`.
        rules: The rules that recognize KV names.
        compile_info: What is known of a compile.
        strict: Whether every warning is an error.
    """
    load = partial(load_models, paths) if paths[1:] else partial(load_model_or_manifest, paths[0])
    return load(
        rules,
        compile_info,
        strict=strict,
        trace_updates=trace_buffer_updates,
        trace_scales=trace_buffer_scales,
        with_weights=True,
    )

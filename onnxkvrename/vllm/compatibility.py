"""Compare the factors of the compatibility hash by which vLLM's NIXL connectors know each other.

Each worker computes a hash, and decode refuses prefill if theirs differ, without a word about what
differs. This follows ``compute_nixl_compatibility_hash`` in
``distributed/kv_transfer/kv_connector/v1/nixl/metadata.py`` of vLLM 0.24.0 and 0.33.0, and what
gives its factors their values: ``resolve_kv_cache_dtype_string``, ``VllmConfig`` for the hybrid
manager, ``SpeculativeConfig``, ``prefer_cross_layer_blocks``. What a checkpoint or a GPU decides
is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from onnxkvrename.findings import Finding, build_finding, format_list
from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.backends import CROSS_LAYERS_BACKENDS, supports_hybrid
from onnxkvrename.vllm.layer_specs import build_specs
from onnxkvrename.vllm.projection import project_layout
from onnxkvrename.vllm.serve import DEFAULT_CONNECTOR, ServeSettings
from onnxkvrename.vllm.specs import (
    CHUNKED_KINDS,
    MLA_KINDS,
    VLLM_VERSIONS,
    KvCacheSpec,
    ProjectionRequest,
    plan_request,
)

FactorState = Literal["equal", "differs", "not known"]

_GRAPH = "model"
"""What sets the factors that the graphs show."""
_CHECKPOINT_CACHE_DTYPES = ("auto", "fp8_e4m3", "nvfp4")
"""What ``--kv-cache-dtype auto`` becomes, by the checkpoint's quantization."""
_HIDDEN_STATE_METHODS = ("eagle", "eagle3", "mtp", "dflash", "dspark")
"""The speculative methods that read the model's hidden states; only these are in the hash."""
_METHODS_BY_NAME = (
    ("eagle-", "eagle"),
    ("eagle3", "eagle3"),
    ("dflash", "dflash"),
    ("dspark", "dspark"),
)
"""A part of a draft model's name, and the method that vLLM takes it for."""
_PARALLEL_METHODS = ("dflash", "dspark")
_OTHER_METHODS = ("ngram", "[ngram]", "ngram_gpu", "suffix", "draft_model", "extract_hidden_states")


class Worker(NamedTuple):
    """One side of a hand-off as vLLM runs it.

    Attributes:
        layout: Its KV buffers.
        request: The settings of its projection, with vLLM's version and its line.
    """

    layout: Layout
    request: ProjectionRequest

    @property
    def settings(self) -> ServeSettings | None:
        """What its ``vllm serve`` line says; ``None`` without one."""
        return self.request.serve

    @property
    def release(self) -> str:
        """vLLM's release, as ``--vllm`` says it."""
        return plan_request(self.request).release

    @property
    def version(self) -> str:
        """The version whose planning holds for the release."""
        return plan_request(self.request).vllm_version


class Factor(NamedTuple):
    """A factor of the compatibility hash, compared between prefill and decode.

    Attributes:
        name: What it is, in a few words.
        state: Whether both sides have the same value.
        prefill: The value on prefill, as far as it is known; empty if nothing is.
        decode: The same on decode.
        flag: The option or variable that sets it; empty if none does.
    """

    name: str
    state: FactorState
    prefill: str = ""
    decode: str = ""
    flag: str = ""


class Compatibility(NamedTuple):
    """The factors of the compatibility hash, and whether decode compares it.

    Attributes:
        factors: All factors that vLLM's version has.
        is_enforced: Whether decode refuses a hash that differs (``enforce_handshake_compat``).
    """

    factors: tuple[Factor, ...]
    is_enforced: bool = True

    def list_findings(self, version: str) -> Iterator[Finding]:
        """Yield KV628 for each factor that differs, if decode refuses it."""
        for factor in self.select("differs") if self.is_enforced else ():
            flag = factor.flag or "the model"
            yield build_finding(
                "KV628",
                "",
                f"{factor.name}: {factor.prefill} (prefill) and {factor.decode} (decode); it is "
                f"a factor of vLLM {version}'s compatibility hash, and decode refuses prefill with "
                '"NIXL compatibility hash mismatch"',
                f"start both sides with the same {flag}",
            )

    def list_notes(self) -> Iterator[str]:
        """Yield what differs although decode does not look, and what only one line says."""
        for factor in self.factors:
            prefill, decode = (value or "not given" for value in (factor.prefill, factor.decode))
            values = f"{prefill} (prefill), {decode} (decode)"
            if factor.state == "differs" and not self.is_enforced:
                yield (
                    f"vLLM does not compare {factor.name}, with enforce_handshake_compat off on "
                    f"decode: {values}"
                )
            elif factor.state == "not known" and factor.prefill != factor.decode:
                yield f"whether {factor.name} is equal is not known: {values}"

    def describe_equal(self) -> str:
        """Return what is equal, as a fact that a success rests on; empty if nothing is.

        What the graphs show is left out: a comparison of their layers and sizes says more.
        """
        names = [factor.name for factor in self.select("equal") if factor.flag != _GRAPH]
        return f"equal {_join_names(names)}" if names else ""

    def describe_unknown(self) -> str:
        """Return what must be equal and is not known, to be continued after ``both sides``."""
        names = [factor.name for factor in self.select("not known")]
        if not names or not self.is_enforced:
            return ""
        return f"have the same {_join_names(names)} (vLLM compares a hash of them)"

    def select(self, state: FactorState) -> tuple[Factor, ...]:
        """Return the factors with a state."""
        return tuple(factor for factor in self.factors if factor.state == state)


def _join_names(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


class _Value(NamedTuple):
    """What a factor may be on one side.

    Attributes:
        given: What the line or the graph says; empty if it says nothing.
        possible: The values that it may have; empty for any value.
        decided_by: What decides between them.
    """

    given: str = ""
    possible: frozenset[str] = frozenset()
    decided_by: Literal["", "model", "machine"] = ""


_UNKNOWN = _Value()


def _build_value(value: object, given: str = "") -> _Value:
    """Return a value that is known."""
    return _Value(given or str(value), frozenset((str(value),)))


def compare_factors(prefill: Worker, decode: Worker) -> Compatibility:
    """Compare each factor of the compatibility hash of two workers.

    Args:
        prefill: The worker that is read.
        decode: The worker that reads, and that compares the hashes.

    Returns:
        The factors that the hash has in vLLM's version. Workers of different versions differ in
        that; then the other factors are those of prefill's version.
    """
    written_by, read_by = prefill.release, decode.release
    is_same_version = written_by == read_by  # as far as they are told: a patch release also counts
    state: FactorState = "not known" if is_same_version else "differs"
    version = Factor("vLLM version", state, written_by, read_by, "version of vLLM")
    model = _compare("model", _describe_model(prefill), _describe_model(decode), "model name")
    factors = [version, model]
    for name, flag, describe in _list_factors(written_by):
        values = describe(prefill), describe(decode)
        factors.append(_compare(name, *values, flag, is_same_model=model.state == "equal"))
    factors[4:4] = _compare_graphs(prefill, decode)
    settings = decode.settings or ServeSettings()
    is_enforced = bool(settings.extra_config.get("enforce_handshake_compat", True))
    # Workers of these two versions cannot read each other's metadata, whatever decode compares.
    return Compatibility(tuple(factors), is_enforced or not is_same_version)


_Describe = Callable[[Worker], _Value]


def _list_factors(version: str) -> list[tuple[str, str, _Describe]]:
    """Return the factors that settings decide: their names, what sets them, and their values."""
    factors: list[tuple[str, str, _Describe]] = [
        ("dtype", "--dtype", _describe_dtype),
        ("KV cache dtype", "--kv-cache-dtype", _describe_cache_dtype),
        ("attention backend", "--attention-backend", _describe_backend),
        ("hybrid KV cache manager", "--disable-hybrid-kv-cache-manager", _describe_manager),
    ]
    if version not in VLLM_VERSIONS:
        return factors  # what else its hash has is not known
    if version == "0.24":
        flag = "enable_cross_layers_blocks in kv_connector_extra_config"
        return [*factors, ("cross-layer blocks", flag, _describe_cross_layers)]
    return [
        *factors,
        ("speculative config", "--speculative-config", _describe_draft),
        ("transfer mode", "kv_connector in --kv-transfer-config", _describe_transfer_mode),
    ]


def _compare(
    name: str, prefill: _Value, decode: _Value, flag: str, *, is_same_model: bool = False
) -> Factor:
    state: FactorState = "not known"
    sides = (prefill, decode)
    if all(len(side.possible) == 1 for side in sides) and prefill.possible == decode.possible:
        state = "equal"
    elif all(side.possible for side in sides) and prefill.possible.isdisjoint(decode.possible):
        state = "differs"
    elif is_same_model and prefill.decided_by == decode.decided_by == "model":
        choices = [side.possible or frozenset((side.given,)) for side in sides]
        state = "equal" if choices[0] == choices[1] else "not known"
    return Factor(name, state, prefill.given, decode.given, flag)


def _compare_graphs(prefill: Worker, decode: Worker) -> Iterator[Factor]:
    """Yield the factors that both graphs decide: heads, their size, and layers.

    vLLM reads them from the model's configuration. Where layers differ, it has one number for all.
    """
    specs = [_list_attention(worker) for worker in (prefill, decode)]
    measures: dict[str, Callable[[KvCacheSpec], int]] = {
        "KV heads": lambda spec: spec.kv_heads,
        "head size": lambda spec: spec.head_size,
    }
    for name, measure in measures.items():
        first, second = ({spec.layer: measure(spec) for spec in side} for side in specs)
        is_plain = all(len({*side.values()}) == 1 for side in (first, second))
        written, read = (
            format_list(sorted({*map(str, side.values())})) for side in (first, second)
        )
        shared = first.keys() & second.keys()
        state: FactorState = "not known"
        if shared and all(first[layer] == second[layer] for layer in shared):
            state = "equal"
        elif is_plain:
            state = "differs"
        yield Factor(name, state, written, read, _GRAPH)
    before, after = (len(worker.layout.layers) for worker in (prefill, decode))
    state = "equal" if before == after else "differs"
    if state == "differs" and any(map(_may_have_draft, (prefill, decode))):
        state = "not known"  # layers of a draft model do not count
    yield Factor("number of layers", state, str(before), str(after), _GRAPH)


def _list_attention(worker: Worker) -> list[KvCacheSpec]:
    """Return the specs of attention, with the heads of all ranks."""
    whole = build_specs(worker.layout, worker.request._replace(tensor_parallel_size=1))
    return [spec for spec in whole.specs if not spec.is_state]


def _may_have_draft(worker: Worker) -> bool:
    settings = worker.settings
    return settings is None or settings.speculative_config is not None


def _has_mla(worker: Worker) -> bool:
    return any(buffer.kind in MLA_KINDS for buffer in worker.layout.buffers)


def _describe_model(worker: Worker) -> _Value:
    if worker.settings is None or not worker.settings.model:
        return _UNKNOWN
    return _build_value(worker.settings.model)


def _describe_dtype(worker: Worker) -> _Value:
    dtype = None if worker.settings is None else worker.settings.dtype
    if dtype is None:
        return _Value(decided_by="machine")
    return _build_value(dtype)


def _describe_cache_dtype(worker: Worker) -> _Value:
    """Return what ``cache_dtype`` may be; some models of MLA replace it, some by the GPU."""
    if worker.settings is None:
        return _UNKNOWN
    dtype, has_mla = worker.settings.kv_cache_dtype, _has_mla(worker)
    if dtype is None:
        possible = frozenset((*_CHECKPOINT_CACHE_DTYPES, *(("fp8",) if has_mla else ())))
        return _Value("auto", possible, "machine" if has_mla else "model")
    if dtype == "bfloat16" and has_mla:
        return _Value(dtype, frozenset((dtype, "auto")), "model")
    return _build_value(dtype)


def _describe_backend(worker: Worker) -> _Value:
    """Return the backend of the first layer, the only one in the hash."""
    first = min(worker.layout.buffers, key=lambda buffer: buffer.layer, default=None)
    if first is not None and first.is_state:
        return _build_value(f"the one of {first.kind}")
    if worker.settings is None or worker.settings.attention_backend is None:
        return _Value(decided_by="machine")
    return _build_value(worker.settings.attention_backend.upper())


def _describe_manager(worker: Worker) -> _Value:
    is_on = has_hybrid_manager(worker)
    return _UNKNOWN if is_on is None else _build_value("on" if is_on else "off")


def has_hybrid_manager(worker: Worker) -> bool | None:
    """Return whether the hybrid manager is on: by default it is, unless attention is chunked.

    ``None`` if that is not known, as for a connector that may not support it.
    """
    settings = worker.settings
    if settings is None or settings.has_hybrid_manager is not None:
        return None if settings is None else settings.has_hybrid_manager
    if any(buffer.kind in CHUNKED_KINDS for buffer in worker.layout.buffers):
        return False
    return supports_hybrid(settings.connector or DEFAULT_CONNECTOR, worker.version)


def _describe_cross_layers(worker: Worker) -> _Value:
    """Return whether one tensor has all layers; 0.24 does that for some backends and runners."""
    settings = worker.settings
    if settings is None:
        return _UNKNOWN
    if not may_have_cross_layers(worker):
        return _build_value("off")
    allocations = project_layout(worker.layout, worker.request).allocations
    is_impossible = (
        settings.uses_v2_model_runner
        or _has_mla(worker)
        or settings.kv_cache_layout not in (None, "HND")
        or not any(each.name == "cross_layers" and each.is_possible for each in allocations)
    )
    if is_impossible:
        return _build_value("off", given="off, as they are not possible")
    if settings.attention_backend is not None and settings.uses_v2_model_runner is False:
        return _build_value("on")
    return _Value("on, if backend and model runner take them", frozenset(("on", "off")), "machine")


def may_have_cross_layers(worker: Worker) -> bool:
    """Return whether 0.24 may put all layers of a block together, as a line asks for.

    One group has then one tensor, which is a factor of the hash; several groups have packed blocks.
    """
    settings = worker.settings
    if settings is None or worker.version != "0.24":
        return False
    backend = settings.attention_backend
    return settings.enables_cross_layers and (
        backend is None or backend.upper() in CROSS_LAYERS_BACKENDS or _has_groups(worker)
    )


def _has_groups(worker: Worker) -> bool:
    return len({buffer.kind for buffer in worker.layout.buffers}) > 1


def _describe_transfer_mode(worker: Worker) -> _Value:
    settings = worker.settings
    if settings is None:
        return _UNKNOWN
    if not settings.uses_nixl:
        return _Value(settings.connector or "")
    return _build_value("pull" if settings.pulls_by_nixl else "push")


def _describe_draft(worker: Worker) -> _Value:
    """Return the speculative config; only methods that read hidden states count."""
    settings = worker.settings
    if settings is None:
        return _UNKNOWN
    config = settings.speculative_config
    if config is None:
        return _build_value("none")
    given = json.dumps(dict(config), sort_keys=True, default=str)
    method = _find_method(config)
    if method is None:
        return _Value(given, decided_by="model")
    if method not in _HIDDEN_STATE_METHODS:
        return _build_value("none", given)
    model = config.get("model") or (settings.model if method == "mtp" else "")
    own_dtype = config.get("kv_cache_dtype")
    cache = _describe_cache_dtype(worker)
    dtypes = [str(own_dtype)] if own_dtype else sorted(cache.possible)
    if not model:
        return _Value(given, decided_by="model")
    texts = (
        json.dumps(
            [
                method,
                model,
                config.get("revision"),
                config.get("code_revision"),
                method in _PARALLEL_METHODS or bool(config.get("parallel_drafting")),
                dtype,
            ]
        )
        for dtype in dtypes
    )
    return _Value(given, frozenset(texts), cache.decided_by or "model")


def _find_method(config: Mapping[str, object]) -> str | None:
    """Return the method, which vLLM may take from the draft model's name; ``None`` if not known."""
    method, model = config.get("method"), str(config.get("model") or "").lower()
    if method in _HIDDEN_STATE_METHODS:
        return str(method)
    if isinstance(method, str) and method.endswith("_mtp"):
        return "mtp"
    if method is None and model in ("ngram", "[ngram]"):
        return "ngram"
    if method in (None, "draft_model"):
        found = next((name for part, name in _METHODS_BY_NAME if part in model), None)
        return found or (None if method is None else "draft_model")
    return str(method) if method in _OTHER_METHODS else None

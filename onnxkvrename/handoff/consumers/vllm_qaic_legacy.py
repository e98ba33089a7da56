"""Describe vllm-qaic with VLLM_QAIC_USE_LEGACY_SLICING_SPEC=1, which selects names without a token.

Source: qualcomm/vllm-qaic at dc7351f, file ``model_loader/qaic_session_np.py``
(``_is_kv_cache_name``, ``get_json_for_kv_cache_slicing``). Only the selection differs; order,
transfer and everything else are those of `vllm_qaic`. Buffers with other names, such as those
of MLA and linear attention, are not handed over.
"""

from __future__ import annotations

from onnxkvrename.handoff.consumers import vllm_qaic

_PREFIXES = ("past_key", "past_value")
CONSUMER = vllm_qaic.CONSUMER._replace(
    name="vllm-qaic-legacy",
    token="",
    selects_input=lambda name: name.startswith(_PREFIXES),
    selects_output=lambda name: name.startswith(_PREFIXES) and name.endswith("RetainedState"),
    selected_inputs="past_key* or past_value*",
    selected_outputs="past_key*RetainedState or past_value*RetainedState",
    setting="VLLM_QAIC_USE_LEGACY_SLICING_SPEC=1",
    alternative=vllm_qaic.CONSUMER.name,
    unselected_hint="unset VLLM_QAIC_USE_LEGACY_SLICING_SPEC, and rename with `--target vllm-qaic`",
)

"""``vllm serve`` lines as operators write them, and the settings that vLLM takes from each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename.errors import KvRenameError
from onnxkvrename.vllm.serve import ServeSettings, parse_serve_line, read_serve_option

NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
CONNECTOR = "--kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role kv_both"
SCRIPT = """\
#!/bin/bash
set -euo pipefail
# the operator's own: don't read
export VLLM_SSM_CONV_STATE_LAYOUT=DS
cd /srv/models
VLLM_KV_CACHE_LAYOUT=BLHNC vllm serve M \\
  --block-size 32 \\
  --kv-transfer-config '{
    "kv_connector": "NixlConnector",
    "kv_role": "kv_producer"}' > serve.log 2>&1 &  # it's in the background
wait
"""
LINES: dict[str, dict[str, Any]] = {
    'TP=2\nexport B="16"\nvllm serve M -tp $TP --block-size "${B}"': {
        "model": "M",
        "tensor_parallel_size": 2,
        "block_size": 16,
    },
    'A="-tp 2 "\nB="16"\nvllm serve M $A--block-size $B "$B"': {
        "model": "M",
        "tensor_parallel_size": 2,
        "block_size": 16,
        "notes": ["not read, although it may change caches: 16"],
        "unread": ["16"],
    },
    'TP=2\necho "TP=$TP"\n# TP=4\nexport TP\nvllm serve M -tp $TP # TP=5': {
        "model": "M",
        "tensor_parallel_size": 2,
    },
    f"C='{NIXL}'\nvllm serve M --kv-transfer-config \"$C\"": {
        "model": "M",
        "connector": "NixlConnector",
        "kv_role": "kv_both",
    },
    f'export C={json.dumps(NIXL)}\nvllm serve M \\\n --kv-transfer-config "${{C}}"': {
        "model": "M",
        "connector": "NixlConnector",
        "kv_role": "kv_both",
    },
    'CMD=(\n  vllm serve M\n  --block-size 64  # of both\n  -tp 4\n)\n"${CMD[@]}"': {
        "model": "M",
        "tensor_parallel_size": 4,
        "block_size": 64,
        "notes": ["not known: what CMD is with"],
        "unread": ["what CMD is with"],
        "gaps": ["what CMD is with"],
    },
    'CMD=( vllm serve M -tp 4 )\nCMD+=( --block-size 64 )\n"${CMD[@]}"': {
        "model": "M",
        "tensor_parallel_size": 4,
        "notes": ["not known: what CMD is with"],
        "unread": ["what CMD is with"],
        "gaps": ["what CMD is with"],
    },
    "cat > x <<EOF\n{\nif it's {\nEOF\nTP=2\nvllm serve M -tp $TP": {
        "model": "M",
        "tensor_parallel_size": 2,
    },
    "export TP=2\ndocker run -e TP=$TP vllm/vllm-openai:latest --model M -tp $TP": {
        "model": "M",
        "tensor_parallel_size": 2,
    },
    'TP=2\nexport TP=$TP\nprintf "TP=%s" $TP\ncurl -d "TP=4" u\nvllm serve M -tp $TP': {
        "model": "M",
        "tensor_parallel_size": 2,
    },
    "A0=aaaaaaaaaa\n"
    + "".join(f'A{n + 1}="$A{n}$A{n}"\n' for n in range(40))
    + "vllm serve M --port $A40": {"model": "M"},
    "cd /m && export VLLM_KV_CACHE_LAYOUT=HND && vllm serve M": {
        "model": "M",
        "kv_cache_layout": "HND",
    },
    'M=/m # it\'s\nvllm serve "${M}" \\\n -dcp 2 # $M': {"model": "/m", "context_parallel_size": 2},
    "--block-size 16": {"block_size": 16},
    "vllm serve M": {"model": "M"},
    "vllm serve --model M": {"model": "M"},
    "vllm serve M -tp 2 -pp=3": {
        "model": "M",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
    },
    "--tensor_parallel_size=4 --port 80 --enforce-eager": {"tensor_parallel_size": 4},
    "-tp 2 -tp 4": {"tensor_parallel_size": 4},
    "-dcp 2 -pcp 2": {"context_parallel_size": 4},
    "/opt/bin/vllm serve M": {"model": "M"},
    "python -m vllm.entrypoints.openai.api_server --model M": {"model": "M"},
    "docker run -e VLLM_KV_CACHE_LAYOUT=HND vllm/vllm-openai:v0.33.0 --model M": {
        "model": "M",
        "kv_cache_layout": "HND",
    },
    "docker run -eVLLM_KV_CACHE_LAYOUT=HND --env=VLLM_USE_V2_MODEL_RUNNER=1 vllm-openai": {
        "kv_cache_layout": "HND",
        "uses_v2_model_runner": True,
    },
    "sudo docker run --rm -it -p 80:80 -v/m:/m --name vllm-a --gpus all reg.io/ai/vllm-qaic:1.2 "
    "--model M -tp 2": {"model": "M", "tensor_parallel_size": 2},
    "podman run -d --ipc=host a/cloud_ai_vllm serve M -tp 2": {
        "model": "M",
        "tensor_parallel_size": 2,
    },
    "docker run a/vllm python3 -m vllm.entrypoints.openai.api_server --model M": {"model": "M"},
    "VLLM_KV_CACHE_LAYOUT=HND; export VLLM_KV_CACHE_LAYOUT; vllm serve M": {
        "model": "M",
        "kv_cache_layout": "HND",
    },
    "export VLLM_KV_CACHE_LAYOUT=HND; VLLM_KV_CACHE_LAYOUT=NHD; vllm serve M": {
        "model": "M",
        "kv_cache_layout": "NHD",
    },
    "VLLM_KV_CACHE_LAYOUT=HND; vllm serve M": {"model": "M"},
    "export VLLM_KV_CACHE_LAYOUT; VLLM_KV_CACHE_LAYOUT=HND; vllm serve M": {
        "model": "M",
        "kv_cache_layout": "HND",
    },
    "export VLLM_KV_CACHE_LAYOUT=HND; unset VLLM_KV_CACHE_LAYOUT; vllm serve M": {"model": "M"},
    "export VLLM_KV_CACHE_LAYOUT=HND; docker run vllm-openai --model M": {"model": "M"},
    "CMD=(\nvllm serve M\n# of (both\n\t-tp 4 --block-size '6' \n --chat-template 'a #)')\n": {
        "model": "M",
        "tensor_parallel_size": 4,
        "block_size": 6,
        "notes": ["not known: what CMD is with"],
        "unread": ["what CMD is with"],
        "gaps": ["what CMD is with"],
    },
    "export VLLM_KV_CACHE_LAYOUT=HND; docker run --env=VLLM_KV_CACHE_LAYOUT vllm-openai -tp 2": {
        "tensor_parallel_size": 2,
        "kv_cache_layout": "HND",
    },
    "export VLLM_KV_CACHE_LAYOUT=HND; docker run -e VLLM_KV_CACHE_LAYOUT vllm-openai --model M": {
        "model": "M",
        "kv_cache_layout": "HND",
    },
    "vllm serve a#b -tp 2 # -tp 4": {"model": "a#b", "tensor_parallel_size": 2},
    "env VLLM_KV_CACHE_LAYOUT=NHD nohup vllm serve M": {"model": "M", "kv_cache_layout": "NHD"},
    "export VLLM_USE_V2_MODEL_RUNNER=0 && vllm serve M": {
        "model": "M",
        "uses_v2_model_runner": False,
    },
    "VLLM_PP_LAYER_PARTITION=3,5 --block-size 8": {"layer_partition": (3, 5), "block_size": 8},
    "VLLM_QAIC_USE_FULL_KV_TRANSFER=1 vllm serve M": {"model": "M", "uses_full_transfer": True},
    "--kv-cache-dtype fp8_e5m2 --dtype bfloat16": {
        "kv_cache_dtype": "fp8_e5m2",
        "dtype": "bfloat16",
    },
    "--dtype half": {"dtype": "float16"},
    "--kv-cache-dtype auto --attention-backend auto": {},
    "--kv-cache-dtype-skip-layers 0 7": {"skipped_layers": ("0", "7")},
    "--kv-cache-memory-bytes 20G": {"kv_cache_memory_bytes": 20 << 30},
    "--kv-cache-memory-bytes 1.5g": {"kv_cache_memory_bytes": 1_500_000_000},
    "--max-model-len 8k --max-num-seqs 64 --max-num-batched-tokens 2K": {
        "max_model_len": 8000,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
    },
    "--max-model-len 8K": {"max_model_len": 8192},
    "--max-model-len -1": {},
    "--no-enable-prefix-caching": {"has_prefix_caching": False},
    "--enable-prefix-caching --disable-hybrid-kv-cache-manager": {
        "has_prefix_caching": True,
        "has_hybrid_manager": False,
    },
    "--no-disable-hybrid-kv-cache-manager": {"has_hybrid_manager": True},
    "--attention-backend flashinfer": {"attention_backend": "FLASHINFER"},
    "--attention-backend custom": {"attention_backend": "CUSTOM"},
    "-ac.backend FLASH_ATTN": {"attention_backend": "FLASH_ATTN"},
    '--attention-config \'{"backend": "FLASHMLA"}\'': {"attention_backend": "FLASHMLA"},
    '-sc \'{"method": "eagle", "num_speculative_tokens": 3}\'': {
        "speculative_config": {"method": "eagle", "num_speculative_tokens": 3}
    },
    "--spec-method ngram --spec-tokens 2": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}
    },
    f"--kv-transfer-config '{NIXL}'": {"connector": "NixlConnector", "kv_role": "kv_both"},
    "--kv-transfer-config.kv_connector X --kv-transfer-config.kv_role=kv_both "
    "--kv-transfer-config.kv_connector_extra_config.enable_cross_layers_blocks True "
    "--kv-transfer-config.kv_connector_extra_config.bytes 80m": {
        "connector": "X",
        "kv_role": "kv_both",
        "extra_config": {"enable_cross_layers_blocks": "True", "bytes": 80_000_000},
    },
    '--kv-transfer-config \'{"kv_connector": "X", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"bytes": 80m, "note": "5k"}}\'': {
        "connector": "X",
        "kv_role": "kv_both",
        "extra_config": {"bytes": 80_000_000, "note": "5k"},
    },
    SCRIPT: {
        "model": "M",
        "block_size": 32,
        "connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_cache_layout": "BLHNC",
        "ssm_conv_state_layout": "DS",
    },
}


def _list_given(settings: ServeSettings) -> dict[str, Any]:
    """Return the settings that are not the defaults, with plain dictionaries."""
    plain = json.loads(json.dumps(settings._asdict(), default=dict))
    defaults = json.loads(json.dumps(ServeSettings()._asdict(), default=dict))
    return {name: value for name, value in plain.items() if value != defaults[name]}


@pytest.mark.parametrize("line", LINES)
def test_line(line: str) -> None:
    settings = parse_serve_line(line, "0.33")
    assert _list_given(settings) == json.loads(json.dumps(LINES[line]))


@pytest.mark.parametrize(
    ("line", "version", "message"),
    [
        ("vllm serve M -tp $TP", "0.33", "--serve -tp '$TP': the shell has not expanded it"),
        ("-tp 0", "0.33", "--serve -tp '0': pass a whole number of at least 1"),
        ("--block-size", "0.33", "--serve --block-size: requires a value"),
        ("--block_size x", "0.33", "--serve --block_size 'x': "),
        ("--max-model-len 1.5K", "0.33", "--serve --max-model-len '1.5K': pass a number"),
        ("--kv-cache-dtype int3", "0.24", "--kv-cache-dtype 'int3': vLLM 0.24 takes auto, "),
        ("--kv-cache-dtype nvfp4_4over6", "0.24", "vLLM 0.24 takes auto, "),
        ("VLLM_KV_CACHE_LAYOUT=BLHNC vllm serve M", "0.24", "vLLM 0.24 takes NHD, HND"),
        (
            "--attention-backend FLASH_ATN",
            "0.33",
            "'FLASH_ATN': vLLM 0.33 has no attention backend",
        ),
        ("--attention-backend HPC_ATTN", "0.24", "'HPC_ATTN': vLLM 0.24 has no attention backend"),
        ("-ac.backend my.module.Backend", "0.33", "-ac.backend 'my.module.Backend': vLLM 0.33 has"),
        ("VLLM_USE_V2_MODEL_RUNNER=no vllm serve M", "0.33", "'no': pass 0 or 1"),
        (
            "-sc {method:eagle}",
            "0.33",
            "(the shell took the quotes of the JSON: write the line into a script, quoted as "
            "usual, and pass `--serve @serve.sh`)",
        ),
        ("-sc '{\"method\"}'", "0.33", "line 1 column 10 (char 9)"),
        ("M=a\nM=b\nvllm serve M -tp $M", "0.33", "in a script assign it on a line above"),
        ("M=`x`\nvllm serve M -tp $M", "0.33", "'$M': the shell has not expanded it"),
        ("M=2 vllm serve M -tp $M", "0.33", "'$M': the shell has not expanded it"),
        ("M=2\nvllm serve M -tp '$M'", "0.33", "'$M': the shell has not expanded it"),
        ("M=2\nM+=4\nvllm serve M -tp $M", "0.33", "'$M': the shell has not expanded it"),
        ("M=2\nread M\nvllm serve M -tp $M", "0.33", "'$M': the shell has not expanded it"),
        *(
            (f"M=2\n{script}\nvllm serve M -tp $M", "0.33", "once and in any case, as NAME=VALUE")
            for script in (
                'if [ "$1" = big ]; then M=4; fi',
                "while [ $# -gt 0 ]; do case $1 in --tp) M=$2; shift;; esac; done",
                'test "$ROLE" = d && { M=64; }',
                "f() { M=4; }",
                "(M=4",
                ": ${M:=4}",
                "((M*=2))",
                "declare M=4",
            )
        ),
        *(
            (f"{script}\nvllm serve M -tp $M", "0.33", "'$M': the shell has not expanded it")
            for script in (
                "if a\nthen\n  M=2\nfi",
                "case a in\nb)\n  M=2 ;;\nesac",
                "f() {\n  M=2\n}",
                "a && M=2",
                "a ||\n M=2",
                "M=(2)",
                "M=~/2",
                "M=[2]",
            )
        ),
        ("vllm serve A\n-tp 2", "0.33", "several vllm serve lines"),
        ("-sc '[1]'", "0.33", "is not an object of JSON"),
        ("--kv-transfer-config.kv_connector X", "0.33", "kv_role is missing"),
        ("--kv-transfer-config.kv_role both", "0.33", "kv_role is one of kv_producer, "),
        ("--kv-transfer-config.kv_rank 0", "0.33", "vLLM 0.33 has no key kv_rank"),
        ("ls -l", "0.33", "--serve 'ls -l': no vllm serve line"),
        ("docker run --name vllm-a reg/image --model M", "0.33", "(an image counts as vLLM's"),
        ("docker run --entrypoint sh a/vllm -c x", "0.33", "no vllm serve line"),
        ("docker run a/vllm", "0.33", "no vllm serve line"),
        ("docker compose run vllm --block-size 64", "0.33", "no vllm serve line"),
        ("prefill:vllm serve M", "0.33", "(leave out prefill: (only compare takes lines for one"),
        ("Decode:-tp 2", "0.33", "no vllm serve line (leave out Decode: "),
        ("vllm serve A; vllm serve B", "0.33", "several vllm serve lines"),
        ("vllm serve 'M", "0.33", "a quote is not closed"),
        ("A=(\n vllm serve M\n -tp 2", "0.33", "an array is not closed"),
        ("--config absent.yaml", "0.33", "absent.yaml: no such file"),
    ],
)
def test_bad_line(line: str, version: str, message: str) -> None:
    with pytest.raises(KvRenameError) as caught:
        parse_serve_line(line, version)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("vllm serve M --port 8000 --gpu-memory-utilization 0.9 --trust-remote-code", ()),
        ("vllm serve M --ec-transfer-config '{}' --max-num-batched-tokens 8k", ()),
        ("vllm serve M --hf-overrides '{}' --block 16", ("--hf-overrides", "mean --block-size?")),
        ("vllm serve M --tensor-paralel-size 2", ("--tensor-paralel-size",)),
        ("VLLM_MLA_DISABLE=1 vllm serve M", ("VLLM_MLA_DISABLE",)),
        ("VLLM_ATTENTION_BACKEND=FLASHMLA vllm serve M", ("--attention-backend",)),
        ("vllm serve M $MORE", ("$MORE",)),
        ("vllm serve $MODEL --enforce-eager", ("$MODEL",)),
        ("vllm serve M `cat flags`", ("`cat",)),
        ('A=(\n --block-size 64\n)\nvllm serve M "${A[@]}"', ("${A[@]}",)),
        ('A="--block-size 64"\nvllm serve M "$A"', ("--block-size 64 (did you mean",)),
        ("if a; then export VLLM_KV_CACHE_LAYOUT=HND; fi; vllm serve M", ("VLLM_KV_CACHE_LAYOUT",)),
        ("a || export VLLM_KV_CACHE_LAYOUT=HND\nvllm serve M", ("VLLM_KV_CACHE_LAYOUT",)),
        ("if [ -f .env ]; then source .env; fi; vllm serve M", ("the variables of .env",)),
        ("test -f x && { . ./x.env; }\nvllm serve M", ("the variables of ./x.env",)),
        ("export $(grep -v x .env | xargs)\nvllm serve M", ("what export sets",)),
        ('eval "$(cat .env)"\nvllm serve M', ("what eval does",)),
        ("f() {\n vllm serve M\n}\nf", ("what runs the line", "what f() does")),
        ("bash <<EOF\nvllm serve M\nEOF", ("what runs the line",)),
        ("set -ea\nvllm serve M", ("what set exports",)),
        ('while read -r k v; do export "$k=$v"; done < .env\nvllm serve M', ("what read does",)),
        ("if a; then unset VLLM_KV_CACHE_LAYOUT; fi\nvllm serve M", ("what unset does",)),
        ("if a; then export VLLM_KV_CACHE_LAYOUT; fi\nvllm serve M", ("what export sets",)),
        ("env $(cat .env) vllm serve M", ("$(cat",)),
        ("unset; CUDA_VISIBLE_DEVICES=$1 vllm serve M", ()),
        ("docker run -v $HOME/m:/m -p $PORT:80 vllm-openai --model M", ()),
        ("docker run $MORE vllm-openai --model M", ("$MORE",)),
        ('A=( V=1 )\nenv "${A[@]}" vllm serve M', ("${A[@]}",)),
        ("A=1 source e.sh\nvllm serve M", ("e.sh",)),
        ("V=2\nV+=3\nvllm serve M", ("what V+=3 does",)),
        ("set -euo pipefail; mkdir -p x; [ -d x ] || exit 1; sleep 1\nvllm serve M", ()),
        ("echo 'a << b (c'\nvllm serve M", ()),
        ("vllm serve M N -tp 2 O", ("N", "O")),
        ("vllm serve -tp 2 M", ()),
        ("vllm serve M -t 4", ("-t",)),
        ("vllm serve M -tp4", ("-tp4",)),
        ("vllm serve M --tp 4 --revision R", ("--tp (did you mean -tp?)", "--revision")),
        ("vllm serve M -q fp8 -dp 2 -dpl 1 -O3 -cc.mode 3 -ep -n 2", ()),
        ("docker run vllm/vllm-openai:v0.24.0 --model M", ("the image has vLLM 0.24",)),
        ("docker run vllm/vllm-openai:v0.33.0 --model M", ()),
        ("docker run vllm/vllm-openai:latest --model M", ()),
        ("source env.sh; docker run --env-file=x vllm-openai --model M", ("env.sh", "x")),
        (f"{CONNECTOR} --kv-transfer-config.kv_buffer_device cpu", ("kv_buffer_device",)),
        (f"{CONNECTOR} --kv-transfer-config.kv_buffer_device cuda", ()),
        (f"{CONNECTOR} --kv-transfer-config.kv_connector_extra_config.backends+ X", ("backends",)),
    ],
)
def test_flags_that_are_not_understood(line: str, named: tuple[str, ...]) -> None:
    notes = parse_serve_line(line, "0.33").notes
    assert bool(notes) == bool(named)
    assert all(name in " ".join(notes) for name in named)


@pytest.mark.parametrize(
    ("line", "gaps"),
    [
        ("vllm serve $MODEL", ()),
        ("vllm serve ${MODEL_ID} -tp 2", ()),
        ("vllm serve /models/$NAME", ()),
        ("vllm serve $MODEL_ARGS", ("$MODEL_ARGS",)),
        ("vllm serve $ARGS", ("$ARGS",)),
    ],
)
def test_what_the_shell_has_not_expanded_may_be_flags(line: str, gaps: tuple[str, ...]) -> None:
    assert parse_serve_line(line, "0.33").gaps == gaps


def test_files(tmp_path: Path) -> None:
    config = tmp_path / "worker.yaml"
    config.write_text(
        "model: M\ntensor-parallel-size: 2\nkv_cache_dtype: fp8\nenable-prefix-caching: false\n"
        f"kv-transfer-config: {NIXL}\nserved-model-name: [a, b]\nblock-size: 16\n"
    )
    expected = {
        "model": "M",
        "tensor_parallel_size": 2,
        "kv_cache_dtype": "fp8",
        "has_prefix_caching": False,
        "connector": "NixlConnector",
        "kv_role": "kv_both",
        "block_size": 16,
    }
    assert _list_given(read_serve_option(f"@{config}", "0.33")) == expected
    assert _list_given(read_serve_option(f"@{config}", "0.24")) == {
        name: value for name, value in expected.items() if name != "has_prefix_caching"
    }
    script = tmp_path / "serve.sh"
    script.write_text("vllm serve N --config worker.yaml --block-size 32  # more\n")
    settings = read_serve_option(f"@{script}", "0.33")
    assert _list_given(settings) == {**expected, "model": "N", "block_size": 32}
    script.write_text("vllm serve N -tp x")
    with pytest.raises(KvRenameError, match=r"--serve serve\.sh: -tp 'x'"):
        read_serve_option(f"@{script}", "0.33")
    config.write_text("services:\n  vllm:\n    image: vllm/vllm-openai\n")
    with pytest.raises(KvRenameError, match="not the YAML of vLLM's --config: it has services"):
        read_serve_option(f"@{config}", "0.33")
    config.write_text("uvicorn-log-level: info\nenforce-eager: true\n")
    assert _list_given(read_serve_option(f"@{config}", "0.33")) == {}

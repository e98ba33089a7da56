"""Run vLLM's own handling of KV caches from a wheel, without installing it.

The modules that plan, allocate and register KV caches are executed as they are in the wheel.
Everything else that they import is replaced by stand-ins, torch too where it is not installed; then
nothing can be allocated. So neither vLLM's dependencies nor a GPU are needed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

VERSION = "0.24.0"
"""The version of vLLM that is followed."""
VARIABLE = "ONNXKVRENAME_VLLM_WHEELS"
"""The environment variable that names the directory with the wheel."""
_DEFAULT_DIRECTORY = Path(__file__).resolve().parents[1] / "build" / "witness" / "wheels"
_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
EXECUTED_MODULES = {
    f"{_CONNECTORS}.utils",
    f"{_CONNECTORS}.v1.nixl.base_scheduler",
    f"{_CONNECTORS}.v1.nixl.base_worker",
    f"{_CONNECTORS}.v1.nixl.metadata",
    f"{_CONNECTORS}.v1.nixl.pull_worker",
    f"{_CONNECTORS}.v1.nixl.tp_mapping",
    f"{_CONNECTORS}.v1.nixl.utils",
    f"{_CONNECTORS}.v1.offloading.worker",
    f"{_CONNECTORS}.v1.ssm_conv_transfer_utils",
    "vllm.config.utils",
    "vllm.model_executor.layers.attention.mla_attention",
    "vllm.platforms.interface",
    "vllm.utils.math_utils",
    "vllm.v1.attention.backend",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flash_attn_diffkv",
    "vllm.v1.attention.backends.registry",
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.kv_offload.base",
    "vllm.v1.worker.block_table",
    "vllm.v1.worker.gpu.attn_utils",
    "vllm.v1.worker.kv_connector_model_runner_mixin",
    "vllm.v1.worker.utils",
}
"""The modules that are vLLM's own."""
DTYPES = {"FLOAT16": "float16", "BFLOAT16": "bfloat16", "FLOAT": "float32", "FLOAT8E4M3FN": "fp8"}
"""Names of torch's dtypes by ONNX's; torch itself says float8_e4m3fn."""
_ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "fp8": 1}
HAS_TORCH = importlib.util.find_spec("torch") is not None
_REPLACED = {
    "cachetools", "cbor2", "cloudpickle", "msgspec", "prometheus_client", "psutil", "pydantic",
    "regex", "tqdm", "transformers", "triton", "vllm", "xxhash", "zmq",
}  # fmt: skip


if not HAS_TORCH:
    _REPLACED.add("torch")


def find_wheel() -> Path | str:
    """Return vLLM's wheel, or the reason why there is none."""
    directory = Path(os.environ.get(VARIABLE) or _DEFAULT_DIRECTORY)
    if sys.version_info < (3, 11):
        return "vLLM's modules require Python 3.11"
    wheels = sorted(directory.glob(f"vllm-{VERSION}-*.whl"))
    return wheels[0] if wheels else f"no vLLM {VERSION} to compare with: make witness"


class DType(NamedTuple):
    """A stand-in for a dtype of torch."""

    name: str
    itemsize: int


class _StandInType(type):
    """The type of classes that have every attribute and every type parameter."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_stand_in_class(name)

    def __getitem__(cls, parameters: object) -> Any:
        return cls


def make_stand_in_class(name: str) -> Any:
    """Return a class that has every attribute and whose objects take every argument.

    Such an object called with a function returns it, as a decorator does.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def get(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_stand_in_class(name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else make_stand_in_class("result")

    return _StandInType(name, (), {"__init__": init, "__getattr__": get, "__call__": call})


class StandInModule(types.ModuleType):
    """A module that has every name."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, make_stand_in_class(name))
        return self.__dict__[name]


class WheelModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The modules of one wheel, with stand-ins for what they import."""

    def __init__(self, path: Path) -> None:
        self.sources = {}
        with zipfile.ZipFile(path) as archive:
            members = set(archive.namelist())
            for name in EXECUTED_MODULES:
                member = f"{name.replace('.', '/')}.py"
                if member in members:
                    self.sources[name] = archive.read(member)
        self.modules: dict[str, types.ModuleType] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not _is_replaced(fullname):
            return None
        is_package = fullname not in self.sources
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: Any) -> types.ModuleType:
        is_executed = spec.name in self.sources
        module: Any = types.ModuleType(spec.name) if is_executed else StandInModule(spec.name)
        if spec.name == "torch":
            for name, itemsize in _ITEMSIZES.items():
                setattr(module, name, DType(name, itemsize))
        if spec.name == "vllm.utils.torch_utils":
            module.get_dtype_size = lambda dtype: dtype.itemsize
        if spec.name == "vllm":
            module.__version__ = "0"
        if spec.name == "regex":
            module.__dict__.update(vars(re))
        if spec.name in ("vllm.config", "vllm.config.vllm"):
            module.set_current_vllm_config = lambda *_: nullcontext()
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        source = self.sources.get(module.__name__)
        if source is not None:
            exec(compile(source, f"<wheel>/{module.__name__}", "exec"), module.__dict__)

    @contextmanager
    def importable(self) -> Iterator[None]:
        """Make these modules, and no others of their names, importable; within itself for free."""
        if self in sys.meta_path:
            yield
            return
        replaced = {name: sys.modules.pop(name) for name in [*sys.modules] if _is_replaced(name)}
        sys.modules.update(self.modules)
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            names = [name for name in sys.modules if _is_replaced(name)]
            self.modules = {name: sys.modules.pop(name) for name in names}
            sys.modules.update(replaced)


def _is_replaced(module: str) -> bool:
    return module.split(".")[0] in _REPLACED


def make_config(*, cross_layers: bool = False) -> SimpleNamespace:
    """Return what vLLM's modules read of its configuration, for one rank and one stage."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            enable_prefix_caching=False,
            mamba_cache_mode="none",
            kv_sharing_fast_prefill=False,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        kv_transfer_config=SimpleNamespace(
            enable_permute_local_kv=False,
            get_from_extra_config=lambda _, default: default,
            kv_buffer_device="cuda",
            kv_role="kv_both",
            kv_connector_extra_config={"enable_cross_layers_blocks": str(cross_layers)},
        ),
        model_config=SimpleNamespace(
            dtype="",
            enable_sleep_mode=False,
            get_head_size=lambda: 0,
            get_total_num_hidden_layers=lambda: 0,
            get_total_num_kv_heads=lambda: 8,
            hf_config=SimpleNamespace(model_type=""),
            model="",
            use_mla=False,
        ),
        num_prefill_lookahead_tokens=0,
        parallel_config=SimpleNamespace(
            cp_kv_cache_interleave_size=1,
            data_parallel_index=_Port(),
            decode_context_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            rank=0,
            tensor_parallel_size=1,
            world_size=1,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
    )


class _Port(int):
    """A number that a stand-in can be added to."""

    def __radd__(self, other: Any) -> _Port:
        return self


if __name__ == "__main__":
    print(find_wheel())

"""Run vLLM's own planning of KV caches from a wheel, without installing it.

A few modules are executed as they are in the wheel; everything else that they import, torch
first of all, is replaced by stand-ins. So neither vLLM's dependencies nor a GPU are needed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

VARIABLE = "ONNXKVRENAME_VLLM_WHEELS"
"""The environment variable that names the directory with the wheels."""
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
EXECUTED_MODULES = {
    f"{_NIXL}.base_scheduler",
    f"{_NIXL}.base_worker",
    f"{_NIXL}.tp_mapping",
    "vllm.platforms.interface",
    "vllm.utils.math_utils",
    "vllm.v1.core.kv_cache_config_builder",
    "vllm.v1.core.kv_cache_planning",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
}
"""The modules that are vLLM's own; each version has only some of them."""
DTYPES = {"FLOAT16": "float16", "BFLOAT16": "bfloat16", "FLOAT": "float32", "FLOAT8E4M3FN": "fp8"}
"""Names of torch's dtypes by ONNX's."""
_ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "fp8": 1}


def find_wheel(version: str) -> Path | str:
    """Return the wheel of a version of vLLM, or the reason why there is none."""
    instructions = f"pip download --no-deps vllm=={version} -d DIR; {VARIABLE}=DIR"
    directory = os.environ.get(VARIABLE)
    if not directory:
        return f"no vLLM to compare with: {instructions}"
    if sys.version_info < (3, 11):
        return "vLLM's modules require Python 3.11"
    wheels = sorted(Path(directory).glob(f"vllm-{version}-*.whl"))
    return wheels[0] if wheels else f"no vLLM {version} in {directory}: {instructions}"


class DType(NamedTuple):
    """A stand-in for a dtype of torch."""

    name: str
    itemsize: int


class _StandInType(type):
    """The type of classes that have every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_stand_in_class(name)


def make_stand_in_class(name: str) -> Any:
    """Return a class that has every attribute and whose objects take every argument."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def get(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_stand_in_class(name)

    return _StandInType(name, (), {"__init__": init, "__getattr__": get})


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
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        is_executed = spec.name in self.sources
        module = types.ModuleType(spec.name) if is_executed else StandInModule(spec.name)
        if spec.name == "torch":
            for name, itemsize in _ITEMSIZES.items():
                setattr(module, name, DType(name, itemsize))
        if spec.name == "vllm.utils.torch_utils":
            module.get_dtype_size = lambda dtype: dtype.itemsize  # type: ignore[attr-defined]
        if spec.name == "vllm.config.vllm":
            module.set_current_vllm_config = nullcontext  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        source = self.sources.get(module.__name__)
        if source is not None:
            exec(compile(source, f"<wheel>/{module.__name__}", "exec"), module.__dict__)

    @contextmanager
    def importable(self) -> Iterator[None]:
        """Make these modules, and no others of their names, importable."""
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
    return module.split(".")[0] in ("vllm", "torch", "msgspec", "regex", "zmq")


def make_config(*, cross_layers: bool = False, layout: Any = None) -> SimpleNamespace:
    """Return what planning reads of vLLM's configuration."""
    return SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: layout,
        ),
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"enable_cross_layers_blocks": str(cross_layers)}
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
    )

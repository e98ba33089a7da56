"""vLLM's own planning of KV caches, run from a wheel: a witness, and no dependency.

A few modules are executed as they are in the wheel; whatever else they import is
a stand-in, torch first of all. So neither vLLM nor a GPU is needed.
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
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
REAL = {
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
"""What is vLLM's own; a version that has no such module gets along without."""
DTYPES = {"FLOAT16": "float16", "BFLOAT16": "bfloat16", "FLOAT": "float32", "FLOAT8E4M3FN": "fp8"}
_ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "fp8": 1}


def wheel(version: str) -> Path | str:
    """The wheel of a version, or why there is none."""
    how = f"pip download --no-deps vllm=={version} -d DIR; {VARIABLE}=DIR"
    place = os.environ.get(VARIABLE)
    if not place:
        return f"no vLLM to hold against: {how}"
    if sys.version_info < (3, 11):
        return "vLLM's modules want Python 3.11"
    found = sorted(Path(place).glob(f"vllm-{version}-*.whl"))
    return found[0] if found else f"no vLLM {version} in {place}: {how}"


class DType(NamedTuple):
    """A dtype of torch."""

    name: str
    itemsize: int


class Anything(type):
    """A class that has every attribute, and whose objects take every argument."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)


def anything(name: str) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def get(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)

    return Anything(name, (), {"__init__": init, "__getattr__": get})


class StandIn(types.ModuleType):
    """A module that has every name."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, anything(name))
        return self.__dict__[name]


class Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The modules of one wheel, and stand-ins for the others."""

    def __init__(self, path: Path) -> None:
        self.sources = {}
        with zipfile.ZipFile(path) as archive:
            members = set(archive.namelist())
            for name in REAL:
                member = f"{name.replace('.', '/')}.py"
                if member in members:
                    self.sources[name] = archive.read(member)
        self.modules: dict[str, types.ModuleType] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not _theirs(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name) if spec.name in self.sources else StandIn(spec.name)
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
    def there(self) -> Iterator[None]:
        """These modules, and no others of that name, can be imported."""
        before = {name: sys.modules.pop(name) for name in [*sys.modules] if _theirs(name)}
        sys.modules.update(self.modules)
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            self.modules = {name: sys.modules.pop(name) for name in [*sys.modules] if _theirs(name)}
            sys.modules.update(before)


def _theirs(name: str) -> bool:
    return name.split(".")[0] in ("vllm", "torch", "msgspec", "regex", "zmq")


def config(*, cross_layers: bool = False, layout: Any = None) -> SimpleNamespace:
    """vLLM's configuration, as far as planning looks at it."""
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

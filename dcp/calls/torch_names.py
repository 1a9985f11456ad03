"""Undocumented names of ``torch.distributed.checkpoint``, for programs that use them.

The names are torch's own objects. A module of dcp gets missing names through `names_of`; a missing module is
torch's.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

TYPE_CHECKING = False  # `typing` would slow down every `import dcp`
if TYPE_CHECKING:
    from collections.abc import Callable

_TORCH = "torch.distributed.checkpoint"
MODULES = frozenset(
    {
        "_async_executor",
        "_async_process_executor",
        "_async_thread_executor",
        "_checkpointer",
        "_consolidate_hf_safetensors",
        "_dedup_save_plans",
        "_dedup_tensors",
        "_extension",
        "_hf_utils",
        "_nested_dict",
        "_pg_transport",
        "_sharded_tensor_utils",
        "_state_dict_stager",
        "_storage_utils",
        "_traverse",
        "_version",
        "logging_handlers",
        "planner_helpers",
        "resharding",
        "utils",
    }
)
"""Modules that are torch's own."""


def names_of(module: str) -> Callable[[str], object]:
    """Return a module's ``__getattr__`` that looks names up in torch's module.

    Define it outside of type checking: with a ``__getattr__``, a type checker accepts misspelt names.
    """

    def get(name: str) -> object:
        if not name.startswith("__"):
            try:
                return getattr(import_module(f"{_TORCH}.{module}"), name)
            except AttributeError:
                pass
        raise AttributeError(f"module 'dcp.{module}' has no attribute {name!r}")

    return get


def find_modules() -> None:
    """Make imports such as ``import dcp._nested_dict`` return torch's module. The last finder asked."""
    if not any(isinstance(finder, _TorchModules) for finder in sys.meta_path):
        sys.meta_path.append(_TorchModules())


class _TorchModules:
    """Finder and loader of `MODULES`."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != "dcp" or name not in MODULES:
            return None
        # a Loader without the base class, whose import is slow
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        # the import system then returns torch's module, with its own spec
        sys.modules[module.__name__] = import_module(f"{_TORCH}.{module.__name__.rpartition('.')[2]}")

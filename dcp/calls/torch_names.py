"""Names that ``torch.distributed.checkpoint`` has and does not document, and programs use all the same.

They are torch's own, so that a program may replace the package's name everywhere. A module of this package
gets the names that it lacks by `names_of`; one that it does not have is torch's module itself.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

TYPE_CHECKING = False  # every `import dcp` would pay for `typing`
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
"""Modules that are wholly torch's."""


def names_of(module: str) -> Callable[[str], object]:
    """Make a module's ``__getattr__``, which looks in torch's module of that name.

    It is set where no type checker sees it: one that does takes every misspelt name for a good one.
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
    """Let ``import dcp._nested_dict`` and the like give torch's module. Asked last of all finders."""
    if not any(isinstance(finder, _TorchModules) for finder in sys.meta_path):
        sys.meta_path.append(_TorchModules())


class _TorchModules:
    """Finds and loads them."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != "dcp" or name not in MODULES:
            return None
        # a Loader but for its base class, whose module every `import dcp` would pay for
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        # the import system hands out what it finds in sys.modules then: torch's module keeps its own spec
        sys.modules[module.__name__] = import_module(f"{_TORCH}.{module.__name__.rpartition('.')[2]}")

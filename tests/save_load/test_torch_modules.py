"""Submodules of dcp: programs that replace the name ``torch.distributed.checkpoint`` find all names."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType

import pytest
import torch.distributed.checkpoint as stock

MODULES = [module.name for module in pkgutil.iter_modules(stock.__path__) if module.name != "_experimental"]


def names_in(module: ModuleType) -> list[str]:
    """Return the names defined in a module, private names included, without modules and imports."""
    named = ((name, getattr(module, name)) for name in dir(module) if not name.startswith("__"))
    return [
        name
        for name, value in named
        if not isinstance(value, ModuleType)
        and getattr(value, "__module__", module.__name__) == module.__name__
    ]


@pytest.mark.parametrize("name", MODULES)
def test_each_name_of_each_module_exists(name: str) -> None:
    """Each name is dcp's or torch's, also if it is undocumented."""
    torchs = import_module(f"torch.distributed.checkpoint.{name}")
    own = import_module(f"dcp.{name}")
    assert not [defined for defined in names_in(torchs) if not hasattr(own, defined)]


def test_unknown_names_are_attribute_errors() -> None:
    """An unknown name raises AttributeError or ModuleNotFoundError with dcp's module name."""
    module = import_module("dcp.state_dict")
    with pytest.raises(AttributeError, match=r"module 'dcp\.state_dict' has no attribute '_init_optim'"):
        getattr(module, "_init_optim")  # noqa: B009 - names are objects to mypy
    with pytest.raises(ModuleNotFoundError, match=r"dcp\._nested"):
        import_module("dcp._nested")

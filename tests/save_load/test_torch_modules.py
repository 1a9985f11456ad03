"""Programs that replace the name ``torch.distributed.checkpoint`` everywhere find all that they use of it."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType

import pytest
import torch.distributed.checkpoint as stock

MODULES = [module.name for module in pkgutil.iter_modules(stock.__path__) if module.name != "_experimental"]


def names_in(module: ModuleType) -> list[str]:
    """What is defined there, underscored or not: no modules, nothing that it imports from elsewhere."""
    named = ((name, getattr(module, name)) for name in dir(module) if not name.startswith("__"))
    return [
        name
        for name, value in named
        if not isinstance(value, ModuleType)
        and getattr(value, "__module__", module.__name__) == module.__name__
    ]


@pytest.mark.parametrize("name", MODULES)
def test_each_name_of_each_module_is_there(name: str) -> None:
    """Ours or torch's, also those that are not documented."""
    theirs = import_module(f"torch.distributed.checkpoint.{name}")
    ours = import_module(f"dcp.{name}")
    assert not [defined for defined in names_in(theirs) if not hasattr(ours, defined)]


def test_what_torch_has_not_is_an_attribute_error() -> None:
    """As of any module, with our name in it."""
    module = import_module("dcp.state_dict")
    with pytest.raises(AttributeError, match=r"module 'dcp\.state_dict' has no attribute '_init_optim'"):
        getattr(module, "_init_optim")  # noqa: B009 - names are objects to mypy
    with pytest.raises(ModuleNotFoundError, match=r"dcp\._nested"):
        import_module("dcp._nested")

"""``import dcp`` in place of ``torch.distributed.checkpoint``: modules, names and signatures."""

import ast
import importlib
import inspect
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import dcp
from tests.support.programs import run_program

TORCH = "torch.distributed.checkpoint"
ROOT = Path(__file__).parents[2]

MODULES = sorted({path.stem for path in (ROOT / "dcp").iterdir() if find_spec(f"{TORCH}.{path.stem}")})
IMPLEMENTED = frozenset(
    {"async_save", "save", "save_state_dict", "load", "load_state_dict", "_load_state_dict"}
    | {"_load_state_dict_from_keys", "BlockingAsyncStager", "DefaultStager", "FileSystemReader"}
    | {"FileSystemWriter", "DefaultLoadPlanner", "DefaultSavePlanner", "BroadcastingTorchSaveReader"}
    | {"DynamicMetaLoadPlanner", "dcp_to_torch_save", "torch_save_to_dcp", "HuggingFaceStorageReader"}
    | {"QuantizedHuggingFaceStorageReader", "FsspecReader", "FsspecWriter"}
)
"""Names of torch that dcp implements itself; all other names are torch's objects."""

UNLISTED = {"state_dict_loader": ["_load_state_dict", "_load_state_dict_from_keys"]}
UNLISTED |= {"logger": ["_dcp_logger", "_dcp_method_logger"]}
"""Names by module that users import although torch's ``__all__`` lacks them."""

OTHERWISE = {"BroadcastingTorchSaveReader", "HuggingFaceStorageReader"}
"""Classes of torch whose methods have other parameter names than their base class."""


def exported(module: str) -> list[str]:
    """Return the public names of a module of torch."""
    listed = getattr(importlib.import_module(f"{TORCH}.{module}"), "__all__", ())
    return [*listed, *UNLISTED.get(module, ())]


NAMES = [(module, name) for module in MODULES for name in exported(module)]


def named(root: str, module: str, name: str) -> object:
    """Return the object called ``name`` in a module below ``root``."""
    return getattr(importlib.import_module(f"{root}.{module}"), name)


def assert_accepts_all_of(product: object, stock: object) -> None:
    """Assert that dcp's callable accepts all calls of torch's; further parameters are optional keywords."""
    assert callable(product)
    assert callable(stock)
    expected = [p for p in inspect.signature(stock).parameters.values() if not p.name.startswith("_")]
    mine = inspect.signature(product).parameters
    shared = [p for p in mine.values() if p.name in {other.name for other in expected}]
    assert [p.name for p in shared] == [p.name for p in expected]
    for own, other in zip(shared, expected, strict=True):
        assert own.kind == other.kind, own.name
        assert (own.default is own.empty) == (other.default is other.empty), own.name
    for extra in mine.values():
        if extra not in shared and not extra.name.startswith("_"):
            assert extra.kind in (extra.KEYWORD_ONLY, extra.VAR_KEYWORD), extra.name
            assert extra.kind == extra.VAR_KEYWORD or extra.default is not extra.empty, extra.name


def test_torchs_public_modules_exist() -> None:
    """dcp has the known public modules of torch, and exports each name that it implements."""
    assert len(MODULES) >= 16 and {name for _, name in NAMES} >= IMPLEMENTED


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_names_are_torchs_or_accept_all_its_calls(module: str, name: str) -> None:
    """A name that dcp does not implement is torch's object, for isinstance checks. Other names have torch's
    parameters in torch's order, and torch's documented methods."""
    product, stock = named("dcp", module, name), named(TORCH, module, name)
    assert (product is stock) == (name not in IMPLEMENTED)
    if product is stock:
        return
    assert_accepts_all_of(product, stock)
    if inspect.isclass(stock):
        kinds = ("LoadPlanner", "SavePlanner")
        base = next((kind for kind in kinds if name.endswith(kind)), f"Storage{name[-6:]}")
        assert inspect.isclass(product)
        # for stagers torch's class of the same name: a protocol with attributes supports no issubclass
        named_alike = name.endswith("Stager")
        assert issubclass(product, stock if named_alike else getattr(importlib.import_module(TORCH), base))
        for method in () if name in OTHERWISE else dir(stock):
            if not method.startswith("_") and callable(getattr(stock, method)):
                assert_accepts_all_of(getattr(product, method), getattr(stock, method))


def test_everything_torch_exports_at_the_top_is_exported_by_dcp() -> None:
    """``dcp.X`` exists if ``torch.distributed.checkpoint.X`` is a public class or function."""
    stock = importlib.import_module(TORCH)
    public = {
        name
        for name, value in vars(stock).items()
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))
    }
    assert {"save", "load", "async_save", "FileSystemReader", "DefaultSavePlanner"} <= public
    assert public <= set(dcp.__all__)
    for name in dcp.__all__:
        assert getattr(dcp, name) is not None


FRESH = """
import sys
before = set(sys.modules)
import dcp
new = set(sys.modules) - before
assert not new & {"torch", "typing", "re", "dataclasses"}, new
flatten = dcp._nested_dict.flatten_state_dict
from dcp.utils import _DistWrapper
import torch.distributed.checkpoint._nested_dict as nested
assert flatten is nested.flatten_state_dict
assert nested.__spec__.name == "torch.distributed.checkpoint._nested_dict"
for name in sys.argv[1:]:
    assert getattr(dcp, name).__name__ == f"dcp.{name}"
dcp.CheckpointManager
assert "httpx" not in sys.modules  # a run without a catalog does not pay for it
"""


@pytest.mark.exhaustive
def test_submodules_are_attributes_of_dcp_in_a_fresh_interpreter() -> None:
    """``import dcp; dcp.filesystem.FileSystemReader`` needs no further import, as with torch, also for
    torch's own modules. `import dcp` imports neither torch nor slow modules of the standard library."""
    modules = [name for name in MODULES if not name.startswith("_")]
    run = subprocess.run([sys.executable, "-c", FRESH, *modules], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert set(modules) <= set(dir(dcp))


def test_names_are_what_type_checkers_read() -> None:
    """Imports under TYPE_CHECKING and names resolved at run time are the same objects."""
    tree = ast.parse((ROOT / "dcp" / "__init__.py").read_text())
    (guarded,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    read = {
        alias.asname or alias.name: (statement.module, alias.name)
        for statement in guarded.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert set(dcp.__all__) - set(read) <= set(vars(dcp)), set(dcp.__all__) - set(read)
    for name, (module, inner) in read.items():
        assert getattr(dcp, name) is getattr(importlib.import_module(str(module)), inner), name


def test_unknown_names_are_attribute_errors() -> None:
    """A misspelt name is an AttributeError that names it."""
    with pytest.raises(AttributeError, match="'dcp' has no attribute 'laod'"):
        _ = dcp.laod  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"'dcp\.storage' has no attribute 'laod'"):
        _ = dcp.storage.laod  # type: ignore[attr-defined]


def test_errors_are_exceptions_and_exported() -> None:
    """Each error class is in dcp.errors, the common ones in dcp, and ``except Exception`` catches them."""
    errors = importlib.import_module("dcp.errors")
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), dcp.CheckpointError)
    for name in set(errors.__all__) & set(dcp.__all__):
        assert getattr(dcp, name) is getattr(errors, name)
    assert {"CheckpointError", "CheckpointNotFoundError", "MissingKeyError"} <= set(dcp.__all__)
    assert issubclass(dcp.CheckpointError, Exception)
    assert issubclass(dcp.RankFailedError, dcp.CheckpointError)
    assert issubclass(dcp.RankFailedError, dcp.CheckpointException)
    assert errors.RankFailedError is dcp.RankFailedError
    with pytest.raises(AttributeError, match=r"'dcp\.errors' has no attribute 'RankFialedError'"):
        _ = errors.RankFialedError


def test_format_utils_converts_like_torchs(tmp_path: Path) -> None:
    """``python -m dcp.format_utils`` converts torch.save files and back; a missing source is an error."""
    source, folder, back = tmp_path / "model.pt", tmp_path / "sharded", tmp_path / "back.pt"
    torch.save({"weight": torch.arange(6.0).reshape(2, 3), "step": 3}, source)
    for words in (("torch_to_dcp", source, folder), ("dcp_to_torch", folder, back)):
        run = run_program("-m", "dcp.format_utils", *words)
        assert run.returncode == 0, run.stderr
    loaded = torch.load(back, weights_only=True)
    assert loaded["step"] == 3
    assert torch.equal(loaded["weight"], torch.arange(6.0).reshape(2, 3))
    run = run_program("-m", "dcp.format_utils", "dcp_to_torch", tmp_path / "none", "x.pt")
    assert run.returncode == 2 and "no checkpoint folder" in run.stderr

"""``import dcp`` stands in for ``torch.distributed.checkpoint``: modules, names, and what may be passed."""

import ast
import importlib
import importlib.util
import inspect
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import dcp
from tests.support.programs import run_program

TORCH = "torch.distributed.checkpoint"
ROOT = Path(__file__).parents[2]

# module below dcp, and below torch.distributed.checkpoint -> names that are ours, names that are torch's own
TABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "state_dict_saver": (
        ("async_save", "save", "save_state_dict"),
        ("AsyncCheckpointerType", "AsyncSaveResponse"),
    ),
    "state_dict_loader": (("load", "load_state_dict", "_load_state_dict", "_load_state_dict_from_keys"), ()),
    "staging": (("BlockingAsyncStager", "DefaultStager"), ("AsyncStager", "StagingOptions")),
    "stateful": ((), ("Stateful", "StatefulT")),
    "storage": ((), ("StorageReader", "StorageWriter", "WriteResult")),
    "planner": (
        (),
        (
            "BytesIOWriteData",
            "LoadItemType",
            "LoadPlan",
            "LoadPlanner",
            "ReadItem",
            "SavePlan",
            "SavePlanner",
            "TensorWriteData",
            "WriteItem",
            "WriteItemType",
        ),
    ),
    "filesystem": (
        ("FileSystemReader", "FileSystemWriter"),
        ("FileSystem", "FileSystemBase", "SerializationFormat"),
    ),
    "default_planner": (
        ("DefaultLoadPlanner", "DefaultSavePlanner"),
        (
            "create_default_global_load_plan",
            "create_default_global_save_plan",
            "create_default_local_load_plan",
            "create_default_local_save_plan",
        ),
    ),
    "state_dict": (
        (),
        (
            "StateDictOptions",
            "get_model_state_dict",
            "get_optimizer_state_dict",
            "get_state_dict",
            "set_model_state_dict",
            "set_optimizer_state_dict",
            "set_state_dict",
        ),
    ),
    "format_utils": (
        (
            "BroadcastingTorchSaveReader",
            "DynamicMetaLoadPlanner",
            "dcp_to_torch_save",
            "torch_save_to_dcp",
        ),
        (),
    ),
    "metadata": (
        (),
        (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        ),
    ),
    "api": ((), ("CheckpointException",)),
    "optimizer": ((), ("load_sharded_optimizer_state_dict",)),
    "logger": ((), ("_dcp_logger", "_dcp_method_logger")),
    "hf_storage": (("HuggingFaceStorageReader",), ("HuggingFaceStorageWriter",)),
    "quantized_hf_storage": (("QuantizedHuggingFaceStorageReader",), ()),
    "_fsspec_filesystem": (("FsspecReader", "FsspecWriter"), ()),
}
if importlib.util.find_spec(f"{TORCH}.fsspec_filesystem"):
    TABLE["fsspec_filesystem"] = TABLE["_fsspec_filesystem"]

# methods that torch documents for users to override or call, by class
METHODS = {
    "storage.StorageReader": (
        "read_metadata set_up_storage_reader prepare_local_plan prepare_global_plan read_data reset "
        "validate_checkpoint_id"
    ),
    "storage.StorageWriter": (
        "set_up_storage_writer prepare_local_plan prepare_global_plan write_data finish reset storage_meta "
        "validate_checkpoint_id"
    ),
    "planner.LoadPlanner": (
        "set_up_planner create_local_plan create_global_plan finish_plan load_bytes resolve_bytes "
        "resolve_tensor commit_tensor"
    ),
    "planner.SavePlanner": "set_up_planner create_local_plan create_global_plan finish_plan resolve_data",
    "planner.WriteItem": "tensor_storage_size",
    "staging.AsyncStager": "stage should_synchronize_after_execute synchronize_staging",
    "default_planner.DefaultSavePlanner": (
        "set_up_planner create_local_plan create_global_plan finish_plan resolve_data lookup_object "
        "transform_object"
    ),
    "default_planner.DefaultLoadPlanner": (
        "set_up_planner create_local_plan create_global_plan finish_plan load_bytes resolve_bytes "
        "resolve_tensor commit_tensor lookup_tensor transform_tensor"
    ),
    "filesystem.FileSystemReader": (
        "read_metadata set_up_storage_reader prepare_local_plan prepare_global_plan read_data reset "
        "validate_checkpoint_id"
    ),
    "_fsspec_filesystem.FsspecReader": "read_metadata read_data reset validate_checkpoint_id",
    "_fsspec_filesystem.FsspecWriter": "write_data finish reset storage_meta validate_checkpoint_id",
    "filesystem.FileSystemWriter": (
        "set_up_storage_writer prepare_local_plan prepare_global_plan write_data finish reset storage_meta "
        "validate_checkpoint_id stage synchronize_staging close"
    ),
}

OURS = [(module, name) for module, (ours, _) in TABLE.items() for name in ours]
BORROWED = [(module, name) for module, (_, borrowed) in TABLE.items() for name in borrowed]


def named(root: str, module: str, name: str) -> object:
    """The object called ``name`` in a module below ``root``."""
    return getattr(importlib.import_module(f"{root}.{module}"), name)


def assert_accepts_all_of(ours: object, torchs: object) -> None:
    """Whatever call torch's callable takes, ours takes too; what it takes besides is optional, by keyword."""
    assert callable(ours)
    assert callable(torchs)
    theirs = [p for p in inspect.signature(torchs).parameters.values() if not p.name.startswith("_")]
    mine = inspect.signature(ours).parameters
    shared = [p for p in mine.values() if p.name in {other.name for other in theirs}]
    assert [p.name for p in shared] == [p.name for p in theirs]
    for own, other in zip(shared, theirs, strict=True):
        assert own.kind == other.kind, own.name
        assert (own.default is own.empty) == (other.default is other.empty), own.name
    for extra in mine.values():
        if extra not in shared and not extra.name.startswith("_"):
            assert extra.kind in (extra.KEYWORD_ONLY, extra.VAR_KEYWORD), extra.name
            assert extra.kind == extra.VAR_KEYWORD or extra.default is not extra.empty, extra.name


@pytest.mark.parametrize(("module", "name"), BORROWED)
def test_borrowed_names_are_torchs_own_objects(module: str, name: str) -> None:
    """An isinstance check or a subclass of the one works with the other."""
    assert named("dcp", module, name) is named(TORCH, module, name)


@pytest.mark.parametrize(("module", "name"), OURS)
def test_our_names_take_every_call_that_torchs_take(module: str, name: str) -> None:
    """Parameters are torch's in torch's order; ours are added behind, by keyword, with defaults."""
    ours, torchs = named("dcp", module, name), named(TORCH, module, name)
    assert ours is not torchs
    assert_accepts_all_of(ours, torchs)
    if inspect.isclass(torchs):
        kinds = ("LoadPlanner", "SavePlanner")
        base = next((kind for kind in kinds if name.endswith(kind)), f"Storage{name[-6:]}")
        assert inspect.isclass(ours)
        # stagers by torch's class of the name: a protocol with attributes knows no subclasses
        named_alike = name.endswith("Stager")
        assert issubclass(ours, torchs if named_alike else getattr(importlib.import_module(TORCH), base))


@pytest.mark.parametrize("path", METHODS)
def test_documented_methods_take_every_call_that_torchs_take(path: str) -> None:
    """Whoever subclasses or drives a planner or storage finds the methods that torch documents."""
    module, name = path.split(".")
    ours, torchs = named("dcp", module, name), named(TORCH, module, name)
    for method in METHODS[path].split():
        if ours is torchs:
            assert hasattr(ours, method)
            continue
        assert_accepts_all_of(getattr(ours, method), getattr(torchs, method))


def test_everything_torch_exports_at_the_top_is_exported_by_dcp() -> None:
    """``dcp.X`` exists wherever ``torch.distributed.checkpoint.X`` is a public class or function."""
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
import torch.distributed.checkpoint._nested_dict as theirs
assert flatten is theirs.flatten_state_dict
assert theirs.__spec__.name == "torch.distributed.checkpoint._nested_dict"
for name in sys.argv[1:]:
    assert getattr(dcp, name).__name__ == f"dcp.{name}"
dcp.CheckpointManager
assert "httpx" not in sys.modules  # a run without a catalog does not pay for it
"""


def test_submodules_are_attributes_of_dcp_in_a_fresh_interpreter() -> None:
    """``import dcp; dcp.filesystem.FileSystemReader`` needs no further import, as with torch's; torch's own
    modules are found too. `import dcp` alone brings no torch, and none of what takes longer than all the
    rest."""
    modules = [name for name in TABLE if not name.startswith("_")]
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
    """A misspelt name fails at once and is named."""
    with pytest.raises(AttributeError, match="'dcp' has no attribute 'laod'"):
        _ = dcp.laod  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"'dcp\.storage' has no attribute 'laod'"):
        _ = dcp.storage.laod  # type: ignore[attr-defined]


def test_our_errors_are_exceptions_and_exported() -> None:
    """Every error class is in dcp.errors, the most wanted in dcp, and ``except Exception`` catches it."""
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


@pytest.mark.parametrize("name", sorted({*dcp.errors.__all__} - {"OptionError"}))  # younger than the move
def test_errors_that_were_in_dcp_still_are(name: str) -> None:
    """Code that catches ``dcp.PlanError`` works, and a warning says the new place where there is one."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert getattr(dcp, name) is getattr(dcp.errors, name)
    assert name in dcp.__all__ or f"dcp.{name} is dcp.errors.{name}" in str(warned[0].message)


def test_format_utils_converts_from_the_command_line_as_torchs_does(tmp_path: Path) -> None:
    """``python -m dcp.format_utils`` turns a torch.save file into a checkpoint and back."""
    source, folder, back = tmp_path / "model.pt", tmp_path / "sharded", tmp_path / "back.pt"
    torch.save({"weight": torch.arange(6.0).reshape(2, 3), "step": 3}, source)
    for words in (("torch_to_dcp", source, folder), ("dcp_to_torch", folder, back)):
        run = run_program("-m", "dcp.format_utils", *words)
        assert run.returncode == 0, run.stderr
    loaded = torch.load(back, weights_only=True)
    assert loaded["step"] == 3
    assert torch.equal(loaded["weight"], torch.arange(6.0).reshape(2, 3))


def test_format_utils_refuses_a_source_that_is_not_there(tmp_path: Path) -> None:
    """Converting nothing is an error, not a success with a printed remark."""
    run = run_program("-m", "dcp.format_utils", "dcp_to_torch", tmp_path / "none", "x.pt")
    assert run.returncode == 2
    assert "no checkpoint folder" in run.stderr

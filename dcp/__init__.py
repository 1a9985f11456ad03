"""Sharded checkpointing for PyTorch. ``import dcp`` replaces ``torch.distributed.checkpoint``.

The package has every name that torch exports, with the same parameters. Names and submodules are imported on
first use (PEP 562), so the command line, the service and the formats do not import torch.
"""

from importlib import import_module

from dcp.calls.torch_names import find_modules as _find_modules

TYPE_CHECKING = False  # type checkers know the name; `typing` would be most of what `import dcp` takes
if TYPE_CHECKING:
    from dcp._fsspec_filesystem import FsspecReader as FsspecReader
    from dcp._fsspec_filesystem import FsspecWriter as FsspecWriter
    from dcp.api import CheckpointException as CheckpointException
    from dcp.conversion.driver import ConversionReport as ConversionReport
    from dcp.conversion.run import convert as convert
    from dcp.conversion.run import merge as merge
    from dcp.conversion.transformers_maps import transformers_map as transformers_map
    from dcp.default_planner import DefaultLoadPlanner as DefaultLoadPlanner
    from dcp.default_planner import DefaultSavePlanner as DefaultSavePlanner
    from dcp.errors import CheckpointError as CheckpointError
    from dcp.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from dcp.errors import CorruptCheckpointError as CorruptCheckpointError
    from dcp.errors import MissingKeyError as MissingKeyError
    from dcp.filesystem import FileSystemReader as FileSystemReader
    from dcp.filesystem import FileSystemWriter as FileSystemWriter
    from dcp.hf_storage import HuggingFaceStorageReader as HuggingFaceStorageReader
    from dcp.hf_storage import HuggingFaceStorageWriter as HuggingFaceStorageWriter
    from dcp.inspection.checkpoints import open_index as open_index
    from dcp.loading.feature import LoadReport as LoadReport
    from dcp.manager.catalog import CatalogRegistration as CatalogRegistration
    from dcp.manager.manager import CheckpointManager as CheckpointManager
    from dcp.manager.restore import Restored as Restored
    from dcp.manager.retention import Best as Best
    from dcp.manager.retention import Keep as Keep
    from dcp.manager.retention import Retention as Retention
    from dcp.metadata import BytesStorageMetadata as BytesStorageMetadata
    from dcp.metadata import ChunkStorageMetadata as ChunkStorageMetadata
    from dcp.metadata import Metadata as Metadata
    from dcp.metadata import TensorStorageMetadata as TensorStorageMetadata
    from dcp.optimizer import load_sharded_optimizer_state_dict as load_sharded_optimizer_state_dict
    from dcp.planner import LoadPlan as LoadPlan
    from dcp.planner import LoadPlanner as LoadPlanner
    from dcp.planner import ReadItem as ReadItem
    from dcp.planner import SavePlan as SavePlan
    from dcp.planner import SavePlanner as SavePlanner
    from dcp.planner import WriteItem as WriteItem
    from dcp.planners.per_rank import PerRank as PerRank
    from dcp.planners.rescale import Rescale as Rescale
    from dcp.planners.weight_maps.weight_map import weight_map as weight_map
    from dcp.protocol import CheckpointableTensor as CheckpointableTensor
    from dcp.proving import Proof as Proof
    from dcp.proving import prove as prove
    from dcp.quantized_hf_storage import (
        QuantizedHuggingFaceStorageReader as QuantizedHuggingFaceStorageReader,
    )
    from dcp.ranks.failures import RankFailedError as RankFailedError
    from dcp.state_dict_loader import load as load
    from dcp.state_dict_loader import load_state_dict as load_state_dict
    from dcp.state_dict_loader import read as read
    from dcp.state_dict_saver import AsyncCheckpointerType as AsyncCheckpointerType
    from dcp.state_dict_saver import SaveFuture as SaveFuture
    from dcp.state_dict_saver import async_save as async_save
    from dcp.state_dict_saver import save as save
    from dcp.state_dict_saver import save_state_dict as save_state_dict
    from dcp.storage import StorageReader as StorageReader
    from dcp.storage import StorageWriter as StorageWriter
    from dcp.watching import watch as watch

_NAMES = {
    "dcp._fsspec_filesystem": ("FsspecReader", "FsspecWriter"),
    "dcp.api": ("CheckpointException",),
    "dcp.conversion.driver": ("ConversionReport",),
    "dcp.conversion.transformers_maps": ("transformers_map",),
    "dcp.conversion.run": ("convert", "merge"),
    "dcp.default_planner": ("DefaultLoadPlanner", "DefaultSavePlanner"),
    "dcp.errors": (
        "CheckpointError",
        "CheckpointNotFoundError",
        "CorruptCheckpointError",
        "MissingKeyError",
    ),
    "dcp.ranks.failures": ("RankFailedError",),
    "dcp.filesystem": ("FileSystemReader", "FileSystemWriter"),
    "dcp.hf_storage": ("HuggingFaceStorageReader", "HuggingFaceStorageWriter"),
    "dcp.inspection.checkpoints": ("open_index",),
    "dcp.manager.manager": ("CheckpointManager",),
    "dcp.manager.catalog": ("CatalogRegistration",),
    "dcp.manager.restore": ("Restored",),
    "dcp.manager.retention": ("Best", "Keep", "Retention"),
    "dcp.metadata": ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "TensorStorageMetadata"),
    "dcp.optimizer": ("load_sharded_optimizer_state_dict",),
    "dcp.planner": ("LoadPlan", "LoadPlanner", "ReadItem", "SavePlan", "SavePlanner", "WriteItem"),
    "dcp.planners.per_rank": ("PerRank",),
    "dcp.planners.rescale": ("Rescale",),
    "dcp.planners.weight_maps.weight_map": ("weight_map",),
    "dcp.protocol": ("CheckpointableTensor",),
    "dcp.proving": ("Proof", "prove"),
    "dcp.quantized_hf_storage": ("QuantizedHuggingFaceStorageReader",),
    "dcp.loading.feature": ("LoadReport",),
    "dcp.state_dict_loader": ("load", "load_state_dict", "read"),
    "dcp.state_dict_saver": (
        "AsyncCheckpointerType",
        "SaveFuture",
        "async_save",
        "save",
        "save_state_dict",
    ),
    "dcp.storage": ("StorageReader", "StorageWriter"),
    "dcp.watching": ("watch",),
}

_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)

_find_modules()

if not TYPE_CHECKING:  # with this function, a type checker accepts misspelt names

    def __getattr__(name: str) -> object:
        module = _HOMES.get(name, f"dcp.{name}")
        unknown = AttributeError(f"module 'dcp' has no attribute {name!r}")
        if name.startswith("__") or not name.isidentifier():  # `dcp.__main__` must not run the command
            raise unknown
        try:
            found = import_module(module)
        except ModuleNotFoundError as error:
            if error.name == module:
                raise unknown from None
            if error.name != "torch":
                raise
            message = f"{module} needs torch: pip install 'dcphub[torch]'"
            raise ModuleNotFoundError(message, name="torch") from error
        if name in _HOMES:
            found = globals()[name] = getattr(found, name)
        return found


def __dir__() -> list[str]:
    from pkgutil import iter_modules

    return sorted({*globals(), *__all__, *(module.name for module in iter_modules(__path__))})

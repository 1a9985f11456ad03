"""Names of ``torch.distributed.checkpoint.metadata``: torch's own classes, which `.metadata` is made of."""

from torch.distributed.checkpoint.metadata import *  # noqa: F403 - each name of its users
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE as STATE_DICT_TYPE
from torch.distributed.checkpoint.metadata import STORAGE_TYPES as STORAGE_TYPES

from dcp.calls.torch_names import names_of as _names_of

globals()["__getattr__"] = _names_of("metadata")

"""Names of ``torch.distributed.checkpoint.metadata``: torch's own classes, which `.metadata` is made of."""

from torch.distributed.checkpoint.metadata import *  # noqa: F403 - each name of its users

from dcp.calls.torch_names import names_of

globals()["__getattr__"] = names_of("metadata")

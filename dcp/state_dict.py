"""Names of ``torch.distributed.checkpoint.state_dict``: torch's helpers for models and optimizers.

The helpers convert parallel models and optimizers to state dicts with fully qualified names, and back.
"""

from torch.distributed.checkpoint.state_dict import *  # noqa: F403 - each name of its users

from dcp.calls.torch_names import names_of as _names_of

globals()["__getattr__"] = _names_of("state_dict")

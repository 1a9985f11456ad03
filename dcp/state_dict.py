"""Names of ``torch.distributed.checkpoint.state_dict``: torch's own helpers around models and optimizers.

They turn parallelised models and optimizers into state dicts of fully qualified names and back;
`dcp.save` and `dcp.load` take what they return.
"""

from torch.distributed.checkpoint.state_dict import *  # noqa: F403 - each name of its users

from dcp.calls.torch_names import names_of as _names_of

globals()["__getattr__"] = _names_of("state_dict")

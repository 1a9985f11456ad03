"""Names of ``torch.distributed.checkpoint.stateful``: torch's own protocol of objects with a state dict."""

from torch.distributed.checkpoint.stateful import Stateful, StatefulT

from dcp.calls.torch_names import names_of

__all__ = ["Stateful", "StatefulT"]

globals()["__getattr__"] = names_of("stateful")

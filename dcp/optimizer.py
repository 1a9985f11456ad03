"""Names of ``torch.distributed.checkpoint.optimizer``: torch's own, and it works with our readers."""

from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

from dcp.calls.torch_names import names_of

__all__ = ["load_sharded_optimizer_state_dict"]

globals()["__getattr__"] = names_of("optimizer")

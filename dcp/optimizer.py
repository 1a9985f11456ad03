"""Names of ``torch.distributed.checkpoint.optimizer``. The functions are torch's and accept dcp's readers."""

from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

from dcp.calls.torch_names import names_of

__all__ = ["load_sharded_optimizer_state_dict"]

globals()["__getattr__"] = names_of("optimizer")

"""What ``torch.distributed.checkpoint.optimizer`` has: torch's own, and it works with our readers."""

from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

__all__ = ["load_sharded_optimizer_state_dict"]

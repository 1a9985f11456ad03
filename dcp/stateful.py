"""What ``torch.distributed.checkpoint.stateful`` has: torch's own protocol of objects with a state dict."""

from torch.distributed.checkpoint.stateful import Stateful, StatefulT

__all__ = ["Stateful", "StatefulT"]

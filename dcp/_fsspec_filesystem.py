"""What ``torch.distributed.checkpoint._fsspec_filesystem`` has: torch's own for now."""

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter"]

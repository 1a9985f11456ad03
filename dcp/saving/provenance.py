"""Who saved a checkpoint: what goes into the manifest beside the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dcp.version import __version__

if TYPE_CHECKING:
    from dcp.ranks.collectives import Ranks
    from dcp.saving.options import SaveOptions

__all__ = ["provenance_of"]


def provenance_of(ranks: Ranks, options: SaveOptions) -> dict[str, Any]:
    """Facts about the job that ``ranks`` belong to."""
    facts = {
        "world_size": ranks.world_size,
        "torch_version": str(torch.__version__),
        "dcphub_version": __version__,
    }
    if options.resumed_from is not None:
        facts["resumed_from"] = dict(options.resumed_from)
    return facts

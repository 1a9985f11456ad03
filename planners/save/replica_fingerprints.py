"""One rank's fold of each set of ranks that share rows: 64 bits over the digests of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from dcp.planners.columns import RankSets, SaveColumns
from dcp.planners.layout.item_views import item_views
from dcp.planners.save.digest import ReplicaCheck, digest_tensors

__all__ = ["folds_of"]

_FOLD_BYTES = 8


def folds_of(
    sets: RankSets,
    columns: SaveColumns,
    sources: Sequence[torch.Tensor],
    object_digests: npt.NDArray[np.uint64],
    check: ReplicaCheck,
) -> npt.NDArray[np.uint64]:
    """The fold of each set, in the order of their numbers, for the values that ``sources`` have now."""
    items = digest_tensors(item_views(columns, sources, sets.item_rows), check)
    objects = object_digests[sets.object_rows]
    bounds = zip(pairwise(sets.item_start.tolist()), pairwise(sets.object_start.tolist()), strict=True)
    folds = [
        blake2b(items[first:last].tobytes() + objects[begin:end].tobytes(), digest_size=_FOLD_BYTES).digest()
        for (first, last), (begin, end) in bounds
    ]
    return np.frombuffer(b"".join(folds), np.uint64)

"""One rank's fold of each set of ranks that share rows: 64 bits over the digests of its rows."""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dcp.planners.columns import RankSets
from dcp.planners.digest import ReplicaCheck, digest_tensors
from dcp.planners.rank_state import RankState

__all__ = ["folds_of"]

_FOLD_BYTES = 8


def folds_of(
    sets: RankSets, part: RankState, object_digests: npt.NDArray[np.uint64], check: ReplicaCheck
) -> npt.NDArray[np.uint64]:
    """The fold of each set, in the order of their numbers, for the values that ``part`` has now."""
    items = digest_tensors(part.views(sets.item_rows), check)
    objects = object_digests[sets.object_rows]
    bounds = zip(pairwise(sets.item_start.tolist()), pairwise(sets.object_start.tolist()), strict=True)
    folds = [
        blake2b(items[first:last].tobytes() + objects[begin:end].tobytes(), digest_size=_FOLD_BYTES).digest()
        for (first, last), (begin, end) in bounds
    ]
    return np.frombuffer(b"".join(folds), np.uint64)

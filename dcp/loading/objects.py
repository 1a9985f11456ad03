"""The values of a load that are no tensors, from a reader into a planner."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

from dcp.storage.formats.torch.python_values import decode_values

if TYPE_CHECKING:
    from dcp.planners.columns import LoadColumns
    from dcp.planners.load.planner import DefaultLoadPlanner
    from dcp.storage.engine.reading.engine import ReadEngine
    from dcp.storage.torch_storage.reader import FileSystemReader

__all__ = ["load_objects"]


def load_objects(
    planner: DefaultLoadPlanner, reader: FileSystemReader, engine: ReadEngine, columns: LoadColumns
) -> None:
    """Read the planned values, and give them to the planner."""
    objects, fqns = engine.index.objects, columns.object_fqns
    plain = objects.plain[columns.objects]
    is_plain = plain >= 0
    planner.store_objects(
        fqns if is_plain.all() else list(compress(fqns, is_plain.tolist())),
        decode_values(list(map(objects.values.__getitem__, plain[is_plain].tolist()))),
    )
    pickled = [objects.fqns[row] for row in columns.objects[~is_plain].tolist()]
    names = compress(fqns, (~is_plain).tolist())
    for fqn, blob in zip(names, reader.read_objects(engine, pickled), strict=True):
        planner.store_blob(fqn, blob)

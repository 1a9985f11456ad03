"""transformers' own conversions of a checkpoint's weights, where that is installed, as a weight map."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dcp.calls.plain_errors import plain_errors
from dcp.planners.weight_maps.conversions import map_of_conversions
from dcp.planners.weight_maps.model_config import model_config
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.storage.errors import OptionError
from dcp.storage.formats.opening.sources import complete_index, open_source
from dcp.storage.stores.opening import OpenWith

__all__ = ["transformers_map"]


@plain_errors
def transformers_map(
    source: str | os.PathLike[str],
    conversions: Sequence[Any] | Any = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> WeightMap:
    """From the weights that a checkpoint has to those of the model that transformers makes of it.

    The rules are those that transformers has for the model, of the names in this checkpoint: experts that are
    stacked, queries and keys that are fused or permuted. Nothing is read of the tensors.

    Args:
        source: A checkpoint of any format, path or URL; a folder of transformers' has the model's
            ``config.json``.
        conversions: A model of transformers', or `WeightRenaming` and `WeightConverter` objects; without
            them those for the ``config.json``'s architecture or model type.
        storage_options: Of the file system of the source's URL.

    Raises:
        OptionError: transformers is not installed, or knows nothing of the model.
        PlanError: Operations that a map cannot say, by name.
    """
    found = open_source(source, open_store=OpenWith(storage_options))
    index = complete_index(found.store, found.index)
    config = model_config(found.store)
    if conversions is None:
        conversions = _of_config(config)
    elif hasattr(conversions, "named_modules"):
        conversions = _conversion_mapping().get_model_conversion_mapping(conversions)
    shapes = {name: index.shape(row) for row, name in enumerate(index.fqns)}
    return map_of_conversions(conversions, shapes).with_config(config)


def _conversion_mapping() -> Any:
    try:
        from transformers import conversion_mapping
    except ImportError as error:
        raise OptionError("transformers 5 or newer is not installed, whose conversions these are") from error
    return conversion_mapping


def _of_config(config: Mapping[str, Any]) -> Sequence[Any]:
    mapping = _conversion_mapping()
    names = [*(config.get("architectures") or ()), config.get("model_type")]
    for name in names:
        found = mapping.get_checkpoint_conversion_mapping(name) if isinstance(name, str) else None
        if found is not None:
            return [*found, *mapping.get_checkpoint_conversion_mapping("legacy")]
    shown = " or ".join(repr(name) for name in names if name) or "a model without config.json"
    raise OptionError(f"transformers has no conversions for {shown}: its weights are those of the checkpoint")

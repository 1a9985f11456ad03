"""Through which weight map a checkpoint is to be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcp.server.core.problems import UnprocessableError
from dcp.server.features.convert.weight_maps import check_map, map_of
from dcp.storage.errors import OptionError, PlanError

if TYPE_CHECKING:
    from dcp.server.core.roots import StorageRoot
    from dcp.storage.formats.index import CheckpointIndex
    from dcp.storage.stores.base import Store

__all__ = ["MapChoice"]


@dataclass(frozen=True, slots=True)
class MapChoice:
    """A ready weight map, or none; ``inverse`` and ``below`` as for `dcp.weight_map`."""

    name: str | None = None
    inverse: bool = False
    below: str | None = None

    def check(self) -> None:
        """UnprocessableError for one that there is not."""
        try:
            check_map(self.name, None, None, inverse=self.inverse, below=self.below)
        except ValueError as error:
            raise UnprocessableError(str(error), field="map") from None

    def apply(
        self, index: CheckpointIndex, store: Store, root: StorageRoot, config: Mapping[str, Any]
    ) -> CheckpointIndex:
        """What there is behind the map, of a model with the ``config.json`` beside ``index``, or ``config``.
        UnprocessableError with what does not fit, which names ``root`` and not where it is."""
        from dcp.planners.weight_maps.axes import model_config
        from dcp.planners.weight_maps.mapped_index import map_all

        weights = map_of(self.name, None, None, inverse=self.inverse, below=self.below)
        if weights is None:
            return index
        try:
            return map_all(index, weights.beside(model_config(store)).beside(config)).index
        except (PlanError, OptionError) as error:
            raise UnprocessableError(root.hide(f"map: {error}"), field="map") from None

    @property
    def code(self) -> str | None:
        """As an argument of `dcp.load`."""
        if self.name is None:
            return None
        more = ", inverse=True" if self.inverse else ""
        more += f", below={self.below!r}" if self.below else ""
        return f"map=dcp.weight_map({self.name!r}{more})" if more else f"map={self.name!r}"

"""Layers of a checkpoint: their sizes, norms and gradients, and their dead and exploding tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from fastapi import Query

from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.names import in_order, layer_of
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.features.tensors import (
    LARGE,
    Mark,
    StatsKind,
    StatsParams,
    feature,
    largest_of,
    mark_of,
    norm_of,
    stored_statistics,
    tensors_of,
)

_ROWS: Final = 200


@dataclass(slots=True)
class Layer:
    """Layer. ``tensors`` counts weights, ``states`` optimizer states. ``elements``, ``zeros``, and the
    ``largest`` magnitude cover weights; ``marked``: dead and exploding tensors by name."""

    name: str
    tensors: int = 0
    states: int = 0
    elements: int = 0
    zeros: int = 0
    nonfinite: int = 0
    largest: float | None = None
    marked: dict[str, Mark] = field(default_factory=dict)
    _squares: float = 0.0
    _second: float = 0.0
    _second_elements: int = 0

    @property
    def norm(self) -> float:
        """Norm of all weights as one vector; NaN or infinite with such an element."""
        return math.sqrt(self._squares)

    @property
    def gradient_rms(self) -> float | None:
        """Root of the mean second moment; NaN or infinite with such an element."""
        return math.sqrt(self._second / self._second_elements) if self._second_elements else None

    @property
    def marks(self) -> Counter[str]:
        """The number of tensors with each mark."""
        return Counter(mark.kind for mark in self.marked.values())

    def add(
        self, fqn: str, dtype: str, values: Mapping[str, Any], *, is_state: bool, moment: Any = None
    ) -> None:
        """Add a tensor with its statistics; ``moment``: statistics of the second moment of a weight."""
        mark = mark_of(dtype, values, moment)
        if mark is not None:
            self.marked[fqn] = mark
        self.nonfinite += values["nans"] + values["infs"] if "float" in dtype else 0
        if is_state:
            self.states += 1
            return
        self.tensors += 1
        self.elements += values["count"]
        self.zeros += values["zeros"]
        self._squares += (norm_of(values) or 0.0) ** 2
        largest = largest_of(values)
        if largest is not None:
            self.largest = largest if self.largest is None else max(self.largest, largest)

    def add_second_moment(self, values: Mapping[str, Any]) -> None:
        """Add the second moment of a weight of the layer."""
        if values["nans"] + values["infs"]:
            self._second += math.nan if values["nans"] else math.inf
        elif values["mean"] is None or values["mean"] < 0:
            return
        else:
            self._second += values["mean"] * values["count"]
        self._second_elements += values["count"]


def _falling(value: float | None) -> float:
    """Return a key that sorts NaN before all numbers, and unknown values after."""
    return 1.0 if value is None else -math.inf if math.isnan(value) else -value


_KEYS: Final[dict[str, Callable[[Layer], Any]]] = {
    "name": lambda layer: in_order(layer.name),
    "norm": lambda layer: _falling(layer.norm),
    "largest": lambda layer: _falling(layer.largest),
    "zeros": lambda layer: -layer.zeros / max(1, layer.elements),
    "gradient": lambda layer: _falling(layer.gradient_rms),
}


@feature.page("/checkpoints/{checkpoint_id}/layers", "layers.html")
def layers_page(
    checkpoint_id: IdPath,
    ask: Ask,
    mark: Literal["any", "dead", "exploding"] | None = None,
    sort: Literal["name", "norm", "largest", "zeros", "gradient"] = "name",
    cursor: Annotated[int, Query(ge=0, le=10**7)] = 0,
) -> dict[str, Any]:
    """Show the statistics of each layer's tensors; ``mark`` selects layers with this mark."""
    found = ask.find(get_checkpoint, checkpoint_id, ask.visible)
    layers = _layers(checkpoint_id, ask)
    shown = [
        layer
        for layer in layers or ()
        if mark is None or (layer.marks if mark == "any" else layer.marks[mark])
    ]
    shown.sort(key=_KEYS[sort])
    return {
        "twin": f"/api/v1/checkpoints/{checkpoint_id}" + ("" if layers is None else "/statistics"),
        "found": found,
        "is_known": layers is not None,
        "layers": shown[cursor : cursor + _ROWS],
        "next_cursor": cursor + _ROWS if len(shown) > cursor + _ROWS else None,
        "is_first": cursor == 0,
        "totals": {kind: sum(layer.marks[kind] for layer in layers or ()) for kind in ("exploding", "dead")},
        "job": ask.last_job(StatsKind, StatsParams(checkpoint_id=checkpoint_id)),
        "mark": mark,
        "sort": sort,
        "large": LARGE,
    }


def _layers(checkpoint_id: int, ask: Ask) -> list[Layer] | None:
    """Return the layers; None where no job has computed statistics of the present content."""
    from dcp.server.features.tensors.optimizers import OptimizerStates  # imports numpy

    with ask.reading() as connection:
        kept = stored_statistics(connection, checkpoint_id, ask.visible)
        if kept is None or kept.is_stale:
            return None
        tensors = tensors_of(connection, kept, 0, kept.tensor_count)
    readable = ask.data.open(checkpoint_id)
    with readable.problems():
        states = OptimizerStates(readable.opened.whole_index)
    weights = {
        name: kept.weights[0] for kept in states if len(kept.weights) == 1 for name in kept.states.values()
    }
    return _layers_of(tensors, weights, states.is_state)


def _layers_of(
    tensors: Iterable[Mapping[str, Any]],
    weights: Mapping[str, str],
    is_state: Callable[[str], bool],
) -> list[Layer]:
    """Return the layers from stored statistics of tensors.

    A state belongs to the layer of its weight in ``weights``; other states have their own layers.
    """
    known = {one["fqn"]: one for one in tensors if one["statistics"] is not None}
    moments = {
        weights[fqn]: one for fqn, one in known.items() if fqn in weights and fqn.endswith(".exp_avg_sq")
    }
    layers: dict[str, Layer] = {}
    for fqn, one in known.items():
        name = layer_of(weights.get(fqn, fqn))
        layer = layers.setdefault(name, Layer(name))
        moment = moments.get(fqn)
        if moment is not None:
            layer.add_second_moment(moment["statistics"])
        of_moment = None if moment is None else moment["statistics"]
        layer.add(fqn, one["dtype"], one["statistics"], is_state=is_state(fqn), moment=of_moment)
    return list(layers.values())

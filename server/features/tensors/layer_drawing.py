"""Layers with what the statistics of their tensors say together: how large, how dead, how wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp.server.catalog.names import layer_of
from dcp.server.core.pages.marks import Mark, largest_of, mark_of, norm_of

__all__ = ["Layer", "layers_of"]


@dataclass(slots=True)
class Layer:
    """``tensors`` are weights, ``states`` of optimizers. ``elements``, ``zeros`` and the ``largest`` of all
    magnitudes are of the weights; ``marked`` are conspicuous tensors, by name."""

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
        """The norm of all weights as one vector; NaN or infinite where an element is."""
        return math.sqrt(self._squares)

    @property
    def gradient_rms(self) -> float | None:
        """The root of the mean second moment; NaN or infinite where an element of that is."""
        return math.sqrt(self._second / self._second_elements) if self._second_elements else None

    @property
    def marks(self) -> Counter[str]:
        """How many tensors have each mark."""
        return Counter(mark.kind for mark in self.marked.values())

    def add(
        self, fqn: str, dtype: str, values: Mapping[str, Any], *, is_state: bool, moment: Any = None
    ) -> None:
        """One tensor with its statistics; ``moment`` are those of the second moment beside a weight."""
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
        """The second moment of one of its weights."""
        if values["nans"] + values["infs"]:
            self._second += math.nan if values["nans"] else math.inf
        elif values["mean"] is None or values["mean"] < 0:
            return
        else:
            self._second += values["mean"] * values["count"]
        self._second_elements += values["count"]


def layers_of(
    tensors: Iterable[Mapping[str, Any]],
    weights: Mapping[str, str],
    is_state: Callable[[str], bool],
) -> list[Layer]:
    """The layers, from the statistics of tensors as a job keeps them.

    ``weights`` has the weight that a state belongs to, whose layer is the state's too; other states are in
    layers of their own.
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

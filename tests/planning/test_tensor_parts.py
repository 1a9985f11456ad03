"""Tensors that are made of others: their parts, what else tells of them, and what is refused."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dcp.planners.flatten import flatten
from dcp.storage.errors import PlanError


class Quantised(torch.Tensor):
    """Rows of bytes with a scale each, as torchao's."""

    data_: torch.Tensor
    scale: torch.Tensor
    settings: Any

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, settings: Any = None) -> Quantised:
        """A tensor without memory of its own."""
        made: Quantised = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=torch.float32, device=data.device
        )
        made.data_, made.scale, made.settings = data, scale, settings
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], (self.settings, tuple(self.shape))

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, Any], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["data_"], inner["scale"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):  # of the same shape
            value = args[0]
            return cls(value.data_, value.scale, value.settings)
        raise NotImplementedError(func)


class Anew(Quantised):
    """One whose scale is computed."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "fresh"], None

    @property
    def fresh(self) -> torch.Tensor:
        """Nobody's memory."""
        return self.scale.clone()


class Mode(enum.Enum):
    """A setting."""

    ROWS = 1


@dataclass
class Settings:
    """More of them."""

    mode: Mode
    dtype: torch.dtype
    sizes: tuple[int, ...]


def made(rows: int = 4, settings: Any = None) -> Quantised:
    """Some numbers."""
    return Quantised(torch.arange(rows * 2, dtype=torch.int8).view(rows, 2), torch.ones(rows, 1), settings)


def test_parts_have_names_below_the_tensor() -> None:
    """In dicts and lists; what is no tensor is plain data."""
    weight = made(settings=Settings(Mode.ROWS, torch.int8, (1, 2)))
    flat = flatten({"model": {"w": weight}, "l": [weight], "n": 1})
    assert list(flat.values) == [
        *("model.w.data_", "model.w.scale", "model.w.subclass"),
        *("l.0.data_", "l.0.scale", "l.0.subclass"),
        "n",
    ]
    assert flat.values["model.w.scale"] is weight.scale
    assert flat.paths["l.0.scale"] == ("l", 0, "scale")
    assert flat.facts == {"model.w.subclass", "l.0.subclass"}
    facts = flat.values["model.w.subclass"]
    assert facts["class"].endswith("test_tensor_parts.Quantised")
    settings = {"class": "Settings", "mode": "Mode.ROWS", "dtype": "torch.int8", "sizes": [1, 2]}
    assert facts["context"] == [settings, [4, 2]]
    assert (facts["shape"], facts["dtype"]) == ([4, 2], "torch.float32")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Anew(torch.zeros(2, 2, dtype=torch.int8), torch.ones(2, 1)), "its fresh is made anew"),
        (made(settings=object()), "no plain data (a object)"),
    ],
)
def test_what_cannot_be_told_is_refused(value: Any, why: str) -> None:
    """With its name and the reason."""
    with pytest.raises(PlanError, match=re.escape(why)) as caught:
        flatten({"w": value})
    assert "'w'" in str(caught.value)

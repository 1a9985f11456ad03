"""A tensor that is made of others, as a user's package has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["Quantised"]


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

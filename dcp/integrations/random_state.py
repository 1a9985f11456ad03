"""Random generators of a process as a `Stateful`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from dcp.planners.rescale import Rescale


class RandomState:
    """Global generators of Python, numpy, torch and the present CUDA device, per rank.

    A rank restores its own; on another number of ranks generators keep their state. The state has only
    tensors and plain numbers.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators, by rank."""
        return {"generators": Rescale(self.get(), "keep")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set all generators."""
        self.set(state_dict["generators"].value)

    def get(self) -> dict[str, Any]:
        """Return the states of this rank's generators."""
        name, key, *rest = np.random.get_state(legacy=True)
        states = {
            "torch": torch.get_rng_state(),
            "numpy": (name, *rest),
            "numpy_key": torch.from_numpy(np.array(key)),
            "python": random.getstate(),
        }
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def set(self, states: dict[str, Any]) -> None:
        """Set all generators."""
        torch.set_rng_state(states["torch"])
        name, *rest = states["numpy"]
        np.random.set_state((name, states["numpy_key"].numpy(), *rest))
        random.setstate(states["python"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])

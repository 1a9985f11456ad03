"""A load feature: load checkpoints with the names of the Hugging Face Hub into another model definition.

``model.layers.0.self_attn.q_proj.weight`` is loaded into ``module.layers.0.wq.weight``. Checkpoints that
already use the names of ``module`` load without a change.
"""

from __future__ import annotations

import re
from typing import Any

from dcp.loading.feature import LoadFeature, View

_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj\.")
_PARTS = {"q": "wq", "k": "wk", "v": "wv", "o": "wo", "gate": "w1", "down": "w2", "up": "w3"}
_OTHERS = {
    "model.embed_tokens.weight": "module.tok_embeddings.weight",
    "model.norm.weight": "module.norm.weight",
    "lm_head.weight": "module.output.weight",
}


class HubNames(LoadFeature):
    """Rename the entries of a checkpoint to the names of the model."""

    name = "hub_names"

    def view(self, view: View, beside: Any) -> View:
        """Return a view with the same tensors and values under other names."""
        return view.renamed(own_name)


def own_name(stored: str) -> str:
    """Return the name in the model for a ``stored`` name; unknown names stay the same."""
    match = _LAYER.match(stored)
    if match is None or match[2] not in _PARTS:
        return _OTHERS.get(stored, stored)
    return f"module.layers.{match[1]}.{_PARTS[match[2]]}.{stored[match.end() :]}"

"""A feature in one file: loads of checkpoints that have the names of Hugging Face's hub.

A state dict with ``module.layers.0.wq.weight`` takes what is stored as
``model.layers.0.self_attn.q_proj.weight``. Checkpoints with names of ``module`` load as ever.
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
    """Shows a checkpoint under the names that a model here has."""

    name = "hub_names"

    def view(self, view: View, beside: Any) -> View:
        """The same tensors and values under other names; nothing has been read of them yet."""
        return view.renamed(own_name)


def own_name(stored: str) -> str:
    """Return the name of a parameter here; what is no layer of such a model keeps its name."""
    match = _LAYER.match(stored)
    if match is None or match[2] not in _PARTS:
        return _OTHERS.get(stored, stored)
    return f"module.layers.{match[1]}.{_PARTS[match[2]]}.{stored[match.end() :]}"

"""Lines of code that load a checkpoint, to be copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Snippet", "snippets_of"]


@dataclass(frozen=True, slots=True)
class Snippet:
    """``title`` says what the code is for."""

    title: str
    code: str


def snippets_of(found: Any, root: Any, base_url: str) -> list[Snippet]:
    """For a checkpoint as the API has it: where its storage is, if that may be known, and by the catalog."""
    code = _by_format(found.format, repr(_place(found, root)))
    client = (
        "from dcp.server.client import Client\n\n"
        f"with Client({base_url.rstrip('/')!r}) as client:\n"
        f'    client.download({found.id}, "checkpoint.safetensors", drop_objects=True)'
    )
    return [*([Snippet("From storage", code)] if code else []), Snippet("From this catalog", client)]


def _place(found: Any, root: Any) -> str:
    """Where it is in storage; where that may not be known, what to put there."""
    return (
        f"WHERE {found.root} IS/{found.key}"
        if root is None or root.url is None
        else f"{root.url.rstrip('/')}/{found.key}"
    )


def _by_format(name: str, place: str) -> str | None:
    match name:
        case "dcp" | "torch_dcp":
            state = 'state = {"model": model}  # as it was saved'
            return f"import dcp\n\n{state}\ndcp.load(state, checkpoint_id={place})"
        case "torch_save":
            return f"import torch\n\nstate = torch.load({place}, weights_only=True)"
        case "safetensors":
            return f"import dcp\n\nstate = dcp.read({place})"
        case _:
            return None

"""States: names, shapes and dtypes, parsed from the forms in which users have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dcp.server.core.problems import UnprocessableError
from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.safetensors import parse_json

if TYPE_CHECKING:
    from dcp.storage.formats.index import CheckpointIndex

__all__ = [
    "StateNames",
    "StateTensor",
    "document_of_text",
    "is_config",
    "state_of_document",
    "state_of_index",
]

_MAX_NAMES: Final = 100_000
_MAX_CHARACTERS: Final = 4096
_MAX_DIMENSIONS: Final = 64
_BY_ANY_NAME: Final = {
    **{dtype.safetensors: name for name, dtype in dtypes.BY_NAME.items() if dtype.safetensors},
    **{name: name for name in dtypes.BY_NAME},
}
_HOW: Final = (
    'paste a config.json of Hugging Face, the output of dcp show --json, or {"name": [shape]} or '
    '{"name": {"dtype": "float32", "shape": [2, 3]}} for each tensor'
)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of a state. A dtype or shape that is None is not known, and not compared."""

    dtype: str | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class StateNames:
    """Tensors and other values by their names. Unless ``has_values`` only tensors are known."""

    tensors: Mapping[str, StateTensor]
    values: frozenset[str] = frozenset()
    has_values: bool = False


def state_of_index(index: CheckpointIndex) -> StateNames:
    """The state of another checkpoint."""
    tensors = {
        fqn: StateTensor(index.dtype(row).name, index.shape(row)) for row, fqn in enumerate(index.fqns)
    }
    return StateNames(tensors, frozenset(index.objects.fqns), has_values=True)


def is_config(document: Mapping[str, Any]) -> bool:
    """Check whether it is a config.json of Hugging Face, whose state is known once the model is made."""
    return isinstance(document.get("model_type"), str)


def document_of_text(text: str) -> dict[str, Any]:
    """Parse pasted text. Raises UnprocessableError."""
    try:
        return parse_json(text.encode("utf-8", "surrogatepass"), "the text")
    except CheckpointFormatError as error:
        raise UnprocessableError(f"{error}; {_HOW}", field="text") from None


def state_of_document(document: Mapping[str, Any]) -> StateNames:
    """The state of the output of ``dcp show --json``, the header of a safetensors file or its index, the
    shapes of a state, or what the job `shapes` has found. Raises UnprocessableError."""
    tensors = document.get("tensors")
    if isinstance(tensors, list):
        objects = document.get("objects")
        named = [(_member(one, "fqn"), one) for one in tensors]
        values = [_member(one, "fqn") for one in objects] if isinstance(objects, list) else []
        return _state(named, values, has_values=isinstance(objects, list))
    weights = document.get("weight_map")
    if isinstance(weights, dict):
        return _state([(name, {}) for name in weights], (), has_values=False)
    return _state([(name, one) for name, one in document.items() if name != "__metadata__"], (), False)


def _state(named: Iterable[tuple[Any, Any]], values: Iterable[Any], has_values: bool) -> StateNames:
    tensors = {_name(name): _tensor(name, one) for name, one in named}
    others = frozenset(map(_name, values))
    if not tensors and not others:
        raise UnprocessableError(f"there is no tensor in it; {_HOW}", field="text")
    if len(tensors) + len(others) > _MAX_NAMES:
        raise UnprocessableError(f"more than {_MAX_NAMES:,} names", field="text")
    return StateNames(tensors, others, has_values)


def _member(one: Any, name: str) -> Any:
    return one.get(name) if isinstance(one, dict) else one


def _name(name: Any) -> str:
    if not isinstance(name, str) or len(name) > _MAX_CHARACTERS:
        raise UnprocessableError(
            f"{str(name)[:60]!r} is no name of a tensor; {_HOW}",
            field="text",
        )
    return name


def _tensor(name: Any, one: Any) -> StateTensor:
    given = one if isinstance(one, dict) else {"shape": one}
    return StateTensor(_dtype(name, given.get("dtype")), _shape(name, given.get("shape")))


def _dtype(name: Any, given: Any) -> str | None:
    if given is None:
        return None
    found = _BY_ANY_NAME.get(given.removeprefix("torch.")) if isinstance(given, str) else None
    if found is None:
        raise UnprocessableError(
            f"{str(name)[:100]!r} has {str(given)[:60]!r}, which is no dtype", field="text"
        )
    return found


def _shape(name: Any, given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    is_list = isinstance(given, list) and len(given) <= _MAX_DIMENSIONS
    if not is_list or not all(type(length) is int and 0 <= length < 2**63 for length in given):
        raise UnprocessableError(
            f"{str(name)[:100]!r} has {str(given)[:60]!r}, which is no shape; {_HOW}", field="text"
        )
    return tuple(given)

"""Load checks: missing, unexpected, and differing names of a state, and remedies.

Parses a state from the formats that users have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from dcp.planners.load.plan import Shapes, hint_for_missing, rename_for_missing, shapes_of
from dcp.planners.load.selection import renamer
from dcp.server.catalog.inputs import clean_text
from dcp.server.catalog.structures import TensorType
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.will_it_load import LoadAnswer, LoadCheck, LoadFindings, LoadProblem, LoadProblemKind
from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.safetensors import parse_json

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
    """Tensor of a state. A dtype or shape of None is unknown, and not compared."""

    dtype: str | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class StateNames:
    """Tensors and other values by their names. Unless ``has_values`` only tensors are known."""

    tensors: Mapping[str, StateTensor]
    values: frozenset[str] = frozenset()
    has_values: bool = False


def state_of_index(index: CheckpointIndex) -> StateNames:
    """Return the state of another checkpoint."""
    tensors = {
        fqn: StateTensor(index.dtype(row).name, index.shape(row)) for row, fqn in enumerate(index.fqns)
    }
    return StateNames(tensors, frozenset(index.objects.fqns), has_values=True)


def is_config(document: Mapping[str, Any]) -> bool:
    """Return True for a Hugging Face config.json; its state is known once the model is built."""
    return isinstance(document.get("model_type"), str)


def document_of_text(text: str) -> dict[str, Any]:
    """Parse pasted text. Raises UnprocessableError."""
    try:
        return parse_json(text.encode("utf-8", "surrogatepass"), "the text")
    except CheckpointFormatError as error:
        raise _wrong(f"{error}; {_HOW}") from None


def state_of_document(document: Mapping[str, Any]) -> StateNames:
    """Return the state in the output of ``dcp show --json``, a safetensors header or index, shapes of a
    state, or the result of the job `shapes`. Raises UnprocessableError."""
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


def _wrong(problem: str) -> UnprocessableError:
    return UnprocessableError(problem, field="text")


def _state(named: Iterable[tuple[Any, Any]], values: Iterable[Any], has_values: bool) -> StateNames:
    tensors = {_name(name): _tensor(name, one) for name, one in named}
    others = frozenset(map(_name, values))
    if not tensors and not others:
        raise _wrong(f"contains no tensor; {_HOW}")
    if len(tensors) + len(others) > _MAX_NAMES:
        raise _wrong(f"more than {_MAX_NAMES:,} names")
    return StateNames(tensors, others, has_values)


def _member(one: Any, name: str) -> Any:
    return one.get(name) if isinstance(one, dict) else one


def _name(name: Any) -> str:
    if not isinstance(name, str) or len(name) > _MAX_CHARACTERS:
        raise _wrong(f"{str(name)[:60]!r} is not the name of a tensor; {_HOW}")
    return name


def _tensor(name: Any, one: Any) -> StateTensor:
    given = one if isinstance(one, dict) else {"shape": one}
    return StateTensor(_dtype(name, given.get("dtype")), _shape(name, given.get("shape")))


def _dtype(name: Any, given: Any) -> str | None:
    if given is None:
        return None
    found = _BY_ANY_NAME.get(given.removeprefix("torch.")) if isinstance(given, str) else None
    if found is None:
        raise _wrong(f"{str(name)[:100]!r}: {str(given)[:60]!r} is not a dtype")
    return found


def _shape(name: Any, given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    is_list = isinstance(given, list) and len(given) <= _MAX_DIMENSIONS
    if not is_list or not all(type(length) is int and 0 <= length < 2**63 for length in given):
        raise _wrong(f"{str(name)[:100]!r}: {str(given)[:60]!r} is not a shape; {_HOW}")
    return tuple(given)


_LISTED: Final = 500
_FATAL: Final = ("missing", "shape", "kind")


def check_load(
    checkpoint_id: int, index: CheckpointIndex, state: StateNames, place: str, through: str | None = None
) -> LoadCheck:
    """Check the checkpoint with this index at ``place`` against the state. ``through``: the argument of
    `dcp.load` for the index's map."""
    plain = _findings(index, state, lambda name: name)
    rules, hint = _remedy(index, state) if plain.counts["missing"] else ({}, None)
    renamed = None
    if rules and (rename := renamer(rules)) is not None:
        renamed = _findings(index, state, rename)
    answer = _answer(plain, renamed)
    return LoadCheck(
        checkpoint_id,
        answer,
        len(state.tensors) + len(state.values),
        plain,
        {clean_text(regex): clean_text(text) for regex, text in rules.items()},
        renamed,
        hint and clean_text(hint),
        clean_text(_code(renamed or plain, rules, place, through)),
    )


def _remedy(index: CheckpointIndex, state: StateNames) -> tuple[dict[str, str], str]:
    names = [*state.tensors, *state.values]
    is_there = {name: name in index.position or name in index.objects.position for name in names}
    missing = [name for name in names if not is_there[name]]
    found = [name for name in names if is_there[name]]
    unused = [name for name in (*index.fqns, *index.objects.fqns) if name not in is_there]
    own = {name: one.shape for name, one in state.tensors.items() if one.shape is not None}
    shapes = Shapes(own, shapes_of(index, unused))
    rules, _ = rename_for_missing(missing, unused, found, shapes)
    hint = hint_for_missing(missing, unused, found, is_renamed=False, shapes=shapes)
    return dict(rules or {}), hint.text


def _findings(index: CheckpointIndex, state: StateNames, stored_name: Callable[[str], str]) -> LoadFindings:
    counts: Counter[str] = Counter()
    problems: list[LoadProblem] = []
    for one in _problems(index, state, stored_name):
        counts[one.kind] += 1
        if counts[one.kind] <= _LISTED:
            stored = one.stored_fqn and clean_text(one.stored_fqn)
            problems.append(replace(one, fqn=clean_text(one.fqn), stored_fqn=stored))
    of_each = {kind: counts[kind] for kind in get_args(LoadProblemKind)}
    lacking = sum(of_each.values()) - of_each["unexpected"]
    return LoadFindings(len(state.tensors) + len(state.values) - lacking, of_each, tuple(problems))


def _problems(
    index: CheckpointIndex, state: StateNames, stored_name: Callable[[str], str]
) -> Iterator[LoadProblem]:
    taken = set()
    for fqn, wanted in state.tensors.items():
        stored = stored_name(fqn)
        taken.add(stored)
        yield from _of_tensor(index, fqn, stored, wanted)
    for fqn in sorted(state.values):
        stored = stored_name(fqn)
        taken.add(stored)
        if stored in index.position:
            yield LoadProblem("kind", fqn, stored, None, _facts(index, index.position[stored]))
        elif stored not in index.objects.position:
            yield LoadProblem("missing", fqn, None, None, None)
    others = [*index.fqns, *(index.objects.fqns if state.has_values else ())]
    for fqn in others:
        if fqn not in taken:
            row = index.position.get(fqn)
            yield LoadProblem("unexpected", fqn, fqn, None, None if row is None else _facts(index, row))


def _of_tensor(index: CheckpointIndex, fqn: str, stored: str, wanted: StateTensor) -> Iterator[LoadProblem]:
    row = index.position.get(stored)
    known = (
        None if None in (wanted.dtype, wanted.shape) else TensorType(wanted.dtype or "", wanted.shape or ())
    )
    if row is None:
        is_value = stored in index.objects.position
        yield LoadProblem("kind" if is_value else "missing", fqn, stored if is_value else None, known, None)
        return
    facts = _facts(index, row)
    shown = TensorType(wanted.dtype or facts.dtype, facts.shape if wanted.shape is None else wanted.shape)
    if shown.shape != facts.shape:
        yield LoadProblem("shape", fqn, stored, shown, facts)
    elif shown.dtype != facts.dtype:
        yield LoadProblem("dtype", fqn, stored, shown, facts)


def _facts(index: CheckpointIndex, row: int) -> TensorType:
    return TensorType(index.dtype(row).name, index.shape(row))


def _answer(plain: LoadFindings, renamed: LoadFindings | None) -> LoadAnswer:
    best = renamed or plain
    if any(best.counts[kind] for kind in _FATAL):
        return "no"
    if best.counts["dtype"]:
        return "cast"
    return "yes" if renamed is None else "rename"


# -- lines of Python -----------------------------------------------------------------------------------------


def _code(left: LoadFindings, rename: Mapping[str, str], place: str, through: str | None) -> str:
    options = [f"checkpoint_id={place!r}", *([through] if through else [])]
    if rename:
        options.append("rename={" + ", ".join(f"{_raw(a)}: {_raw(b)}" for a, b in rename.items()) + "}")
    if left.counts["dtype"]:
        options.append('dtype="cast"')
    if left.counts["missing"]:
        options.append("allow_partial_load=True")
    lines = [
        "import dcp",
        "",
        *_warnings(left),
        "state = model.state_dict()  # with the checked names",
    ]
    if len(options) == 1:
        lines.append(f"dcp.load(state, {options[0]})")
    else:
        lines += ["dcp.load(", "    state,", *(f"    {option}," for option in options), ")"]
    return "\n".join([*lines, "model.load_state_dict(state)"])


def _warnings(left: LoadFindings) -> Iterator[str]:
    if left.counts["missing"]:
        yield f"# not in the checkpoint, keep their initial values: {left.counts['missing']:,} names"
    if left.counts["shape"] + left.counts["kind"]:
        yield "# this load still fails: shapes must equal the saved shapes"


def _raw(text: str) -> str:
    return f'r"{text}"' if "\\" in text and '"' not in text else repr(text)

"""Load checks: names of a state that are missing, unexpected, or of another shape or dtype; and remedies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final, get_args

from dcp.planners.load.plan import hint_for_missing, rename_for_missing
from dcp.planners.load.selection import renamer
from dcp.server.features.will_it_load.records import (
    LoadAnswer,
    LoadCheck,
    LoadFindings,
    LoadProblem,
    LoadProblemKind,
)
from dcp.server.features.will_it_load.states import StateNames, StateTensor
from dcp.server.records.contents import TensorFacts
from dcp.storage.formats.index import CheckpointIndex

__all__ = ["check_load"]

_LISTED: Final = 500
_FATAL: Final = ("missing", "shape", "kind")


def check_load(
    checkpoint_id: int, index: CheckpointIndex, state: StateNames, place: str, through: str | None = None
) -> LoadCheck:
    """Check whether the checkpoint with this index, which is at ``place``, fills the state. ``through``: the
    argument of `dcp.load` for the map that the index is behind."""
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
        rules,
        renamed,
        hint,
        _code(renamed or plain, rules, place, through),
    )


def _remedy(index: CheckpointIndex, state: StateNames) -> tuple[dict[str, str], str]:
    names = [*state.tensors, *state.values]
    is_there = {name: name in index.position or name in index.objects.position for name in names}
    missing = [name for name in names if not is_there[name]]
    found = [name for name in names if is_there[name]]
    unused = [name for name in (*index.fqns, *index.objects.fqns) if name not in is_there]
    rules, _ = rename_for_missing(missing, unused, found)
    return dict(rules or {}), hint_for_missing(missing, unused, found, is_renamed=False)


def _findings(index: CheckpointIndex, state: StateNames, stored_name: Callable[[str], str]) -> LoadFindings:
    counts: Counter[str] = Counter()
    problems: list[LoadProblem] = []
    for one in _problems(index, state, stored_name):
        counts[one.kind] += 1
        if counts[one.kind] <= _LISTED:
            problems.append(one)
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
        None if None in (wanted.dtype, wanted.shape) else TensorFacts(wanted.dtype or "", wanted.shape or ())
    )
    if row is None:
        is_value = stored in index.objects.position
        yield LoadProblem("kind" if is_value else "missing", fqn, stored if is_value else None, known, None)
        return
    facts = _facts(index, row)
    shown = TensorFacts(wanted.dtype or facts.dtype, facts.shape if wanted.shape is None else wanted.shape)
    if shown.shape != facts.shape:
        yield LoadProblem("shape", fqn, stored, shown, facts)
    elif shown.dtype != facts.dtype:
        yield LoadProblem("dtype", fqn, stored, shown, facts)


def _facts(index: CheckpointIndex, row: int) -> TensorFacts:
    return TensorFacts(index.dtype(row).name, index.shape(row))


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
        "state = model.state_dict()  # with the names that were checked",
    ]
    if len(options) == 1:
        lines.append(f"dcp.load(state, {options[0]})")
    else:
        lines += ["dcp.load(", "    state,", *(f"    {option}," for option in options), ")"]
    return "\n".join([*lines, "model.load_state_dict(state)"])


def _warnings(left: LoadFindings) -> Iterator[str]:
    if left.counts["missing"]:
        yield f"# not in the checkpoint, left as the model was made: {left.counts['missing']:,} names"
    if left.counts["shape"] + left.counts["kind"]:
        yield "# this still fails: shapes have to be those that were saved"


def _raw(text: str) -> str:
    return f'r"{text}"' if "\\" in text and '"' not in text else repr(text)

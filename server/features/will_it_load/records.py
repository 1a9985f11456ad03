"""Records of load checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from dcp.server.records.contents import TensorFacts
from dcp.server.records.declaring import OneOf, Shown

__all__ = ["LoadAnswer", "LoadCheck", "LoadFindings", "LoadProblem", "LoadProblemKind"]

LoadAnswer = Literal["yes", "rename", "cast", "no"]
LoadProblemKind = Literal["missing", "shape", "dtype", "kind", "unexpected"]
"""kind: a tensor on one side, another value on the other. unexpected: in the checkpoint alone; left there."""


@dataclass(frozen=True, slots=True)
class LoadProblem:
    """A name that is not the same in a state and in the checkpoint that is to fill it. ``stored_fqn``: what
    it is called in the checkpoint."""

    kind: Annotated[str, OneOf(LoadProblemKind)]
    fqn: Annotated[str, Shown("As the state has it; of an unexpected one as the checkpoint has it.")]
    stored_fqn: Annotated[str | None, Shown("In the checkpoint; null if it is not there.")]
    wanted: Annotated[TensorFacts | None, Shown("In the state; null of values and of what is not known.")]
    stored: Annotated[TensorFacts | None, Shown("In the checkpoint.")]


@dataclass(frozen=True, slots=True)
class LoadFindings:
    """How the names of a state fit. ``counts``: by kind of problem; ``problems``: the first 500 of each."""

    matching: Annotated[int, Shown("That are there, with this shape and dtype as far as they are known.")]
    counts: Annotated[Mapping[str, int], Shown("By kind of problem, all of them.")]
    problems: Annotated[tuple[LoadProblem, ...], Shown("The first 500 of each kind.")]


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """Whether a checkpoint fills a state, as far as names, shapes and dtypes tell. ``rename``: what lets
    `dcp.load` find what is missing under other names, {} if nothing does; ``renamed``: what is found then.

    ``answer``: "yes"; "rename": with that; "cast": with dtype="cast", and that if it is not {}; "no".
    """

    checkpoint_id: int
    answer: Annotated[str, OneOf(LoadAnswer)]
    wanted: Annotated[int, Shown("Names in the state.")]
    plain: Annotated[LoadFindings, Shown("Without a renaming.")]
    rename: Annotated[Mapping[str, str], Shown("For dcp.load; {} if it mends nothing.")]
    renamed: Annotated[LoadFindings | None, Shown("With that.")]
    hint: Annotated[str | None, Shown("What dcp.load would say about what is missing.")]
    code: Annotated[str, Shown("Lines of Python that load it.")]

"""Load checks of a checkpoint against a state: records, and the job ``shapes``.

The job finds names, shapes, and dtypes of a model from a Hugging Face config.json.

A separate process builds the model without memory for tensors, with a time limit, and without remote code:
see `dcp.integrations.model_shapes`, a separate program because the service has no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, Field

from dcp.server.catalog.inputs import Plain
from dcp.server.catalog.structures import TensorType
from dcp.server.core.feature import Feature
from dcp.server.core.jobs.kind import CheckpointId, JobContext, Parameters, PermanentJobError, ReportProgress
from dcp.server.core.jobs.ledger.rows import Json
from dcp.server.core.jobs.subjects import SimpleKind, Subject
from dcp.server.core.security.principal import Scope
from dcp.server.records.declaring import OneOf, Shown

LoadAnswer = Literal["yes", "rename", "cast", "no"]


LoadProblemKind = Literal["missing", "shape", "dtype", "kind", "unexpected"]
"""kind: a tensor on one side, another value on the other. unexpected: in the checkpoint only, and not
loaded."""


@dataclass(frozen=True, slots=True)
class LoadProblem:
    """Name that differs between a state and the checkpoint. ``stored_fqn``: its name in the checkpoint."""

    kind: Annotated[
        str,
        OneOf(LoadProblemKind),
        Shown("kind: a tensor on one side, another value on the other. unexpected: only in the checkpoint."),
    ]
    fqn: Annotated[str, Shown("Name in the state; for an unexpected entry, name in the checkpoint.")]
    stored_fqn: Annotated[str | None, Shown("In the checkpoint; null if missing.")]
    wanted: Annotated[TensorType | None, Shown("In the state; null for values and unknown facts.")]
    stored: Annotated[TensorType | None, Shown("In the checkpoint.")]


@dataclass(frozen=True, slots=True)
class LoadFindings:
    """Matches of the names of a state. ``counts``: by kind of problem; ``problems``: the first 500 each."""

    matching: Annotated[int, Shown("Names with equal known shape and dtype.")]
    counts: Annotated[Mapping[str, int], Shown("By kind of problem, all of them.")]
    problems: Annotated[tuple[LoadProblem, ...], Shown("The first 500 of each kind.")]


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """Load check by names, shapes, and dtypes. ``rename``: renaming by which `dcp.load` finds missing names,
    or {}; ``renamed``: the findings with this renaming.

    ``answer``: "yes"; "rename": with ``rename``; "cast": with dtype="cast", and ``rename`` unless {}; "no".
    """

    checkpoint_id: int
    answer: Annotated[
        str,
        OneOf(LoadAnswer),
        Shown("yes; rename: with `rename`; cast: with dtype=cast and `rename`, if any; no."),
    ]
    wanted: Annotated[int, Shown("Names in the state.")]
    plain: Annotated[LoadFindings, Shown("Without a renaming.")]
    rename: Annotated[Mapping[str, str], Shown("For dcp.load; {} without any.")]
    renamed: Annotated[LoadFindings | None, Shown("With the renaming.")]
    hint: Annotated[str | None, Shown("The hint of dcp.load about missing names.")]
    code: Annotated[str, Shown("Python code for the load.")]


_MAX_CHARACTERS: Final = 1 << 16
_SECONDS: Final = 900.0
"""Enough for a busy machine; the program limits its own processor time."""


def _bounded(config: Any) -> Any:
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError("not a config.json of Hugging Face: model_type is missing")
    if len(json.dumps(config)) > _MAX_CHARACTERS:
        raise ValueError(f"must have {_MAX_CHARACTERS:,} characters at most")
    return config


class ShapesParams(Parameters):
    """The config of a model into which the checkpoint is to be loaded."""

    checkpoint_id: CheckpointId
    config: Annotated[Plain, AfterValidator(_bounded)] = Field(
        description="Content of the model's `config.json`, with a `model_type`."
    )


class ShapesKind(SimpleKind[ShapesParams]):
    """The shapes of a model."""

    name: ClassVar[str] = "shapes"
    about: ClassVar[str] = (
        "Create the model of a config.json without weights, and list names, shapes and dtypes."
    )
    scope: ClassVar[Scope] = "read"
    params = ShapesParams
    max_attempts: ClassVar[int] = 1

    def run(
        self,
        context: JobContext,
        params: ShapesParams,
        subjects: Sequence[Subject],
        report_progress: ReportProgress,
    ) -> Json:
        """As `SimpleKind.run`; reads nothing of the checkpoint."""
        command = [sys.executable, "-m", "dcp.integrations.model_shapes"]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(params.config),
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                cwd=context.work_folder,
                env=_environment(),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PermanentJobError(f"creating the model took more than {_SECONDS:g} s") from None
        if done.returncode:
            raise PermanentJobError("creating the model exceeded the limit of CPU time or memory")
        found: Json = json.loads(done.stdout)
        if "problem" in found:
            raise PermanentJobError(found["problem"])
        return {**found, "tensor_count": len(found["tensors"])}


def _environment() -> dict[str, str]:
    """Return the variables required by the program, without the secrets of the service."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


feature: Final = Feature("will_it_load", __name__, kinds=[ShapesKind()], web=["load_check"])

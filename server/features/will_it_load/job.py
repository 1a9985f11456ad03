"""Shapes of a model (kind ``shapes``): its names, shapes and dtypes, from a config.json of Hugging Face.

The model is made by another process, without memory for its tensors, within a time, and without remote
code: see `dcp.integrations.model_shapes`, which is a program because this service has no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final

from pydantic import AfterValidator

from dcp.server.catalog.inputs import Plain
from dcp.server.core.jobs.kind import CheckpointId, JobContext, Parameters, PermanentJobError, ReportProgress
from dcp.server.core.jobs.ledger.rows import Json
from dcp.server.core.jobs.subjects import SimpleKind, Subject
from dcp.server.core.security.principal import Scope

__all__ = ["ShapesKind", "ShapesParams"]

_MAX_CHARACTERS: Final = 1 << 16
_SECONDS: Final = 900.0
"""Enough for a busy machine; the program limits its own processor time."""


def _bounded(config: Any) -> Any:
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError("a config.json of Hugging Face has a model_type")
    if len(json.dumps(config)) > _MAX_CHARACTERS:
        raise ValueError(f"{_MAX_CHARACTERS:,} characters at most")
    return config


class ShapesParams(Parameters):
    """The config of a model into which the checkpoint is to be loaded."""

    checkpoint_id: CheckpointId
    config: Annotated[Plain, AfterValidator(_bounded)]


class ShapesKind(SimpleKind[ShapesParams]):
    """The shapes of a model."""

    name: ClassVar[str] = "shapes"
    about: ClassVar[str] = (
        "Create the model of a config.json without its weights, and list its names, shapes and dtypes."
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
            raise PermanentJobError(f"making the model took more than {_SECONDS:g} s") from None
        if done.returncode:
            raise PermanentJobError(
                "making the model was stopped: it exceeds the limit of processor time or memory"
            )
        found: Json = json.loads(done.stdout)
        if "problem" in found:
            raise PermanentJobError(found["problem"])
        return {**found, "tensor_count": len(found["tensors"])}


def _environment() -> dict[str, str]:
    """The variables that the program needs, and none of the service's secrets."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}

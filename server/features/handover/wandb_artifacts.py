"""Weights & Biases: artifacts with a reference to the checkpoint's URL, by the package wandb.

Runs in the subprocess of a job, because wandb starts threads and a process. The manifest entry equals
`Artifact.add_reference` with ``checksum=False``, without the packages and credentials of the object store. A
repeated handover of the same content uses the same run and, because W&B compares contents, the same version.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp.server.core.jobs.kind import PermanentJobError, UnavailableJobError
from dcp.server.features.handover.destinations import (
    CheckpointFacts,
    HandedOver,
    HandoverSettings,
    WandbSettings,
    checked_url,
    model_name,
    refusal,
)
from dcp.server.features.webhooks.addresses import (
    Allowed,
    RefusedUrlError,
    permitted_addresses,
    resolve_host,
)

if TYPE_CHECKING:
    import wandb

_NOT_INSTALLED = "wandb is not installed in the worker's environment: pip install 'dcphub[wandb]'"


def log_artifact(
    options: HandoverSettings,
    project: WandbSettings,
    facts: CheckpointFacts,
    reference: str,
    work_folder: Path,
) -> HandedOver:
    """Log the artifact; temporary files are below ``work_folder``. Raises PermanentJobError and
    UnavailableJobError."""
    if project.folder is None:
        _check_address(options, project)
    folder = project.folder or work_folder / "wandb"
    folder.mkdir(parents=True, exist_ok=True)
    # wandb stages files here for upload, except references, also for ``wandb sync``
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        os.environ[name] = str(folder)
    try:
        import wandb
        from wandb.errors import AuthenticationError, CommError, Error, UsageError
    except ImportError as error:
        raise PermanentJobError(_NOT_INSTALLED) from error
    try:
        return _log(wandb, options, project, facts, reference, folder)
    except (AuthenticationError, UsageError, ValueError) as error:
        raise PermanentJobError(f"wandb: {options.clean(str(error))}") from error
    except (CommError, Error, OSError) as error:
        raise UnavailableJobError(f"wandb: {options.clean(str(error))}") from error
    finally:
        wandb.teardown()


def _check_address(options: HandoverSettings, project: WandbSettings) -> None:
    target = checked_url(options, "wandb", project.base_url)
    try:
        permitted_addresses(target, Allowed.parse(options.allow_private), resolve_host)
    except RefusedUrlError as error:
        raise PermanentJobError(f"wandb: {refusal(error)}") from error
    except (OSError, UnicodeError) as error:
        raise UnavailableJobError(f"wandb: the host name {target.host} cannot be resolved") from error


def _log(
    module: Any,
    options: HandoverSettings,
    project: WandbSettings,
    facts: CheckpointFacts,
    reference: str,
    folder: Path,
) -> HandedOver:
    pages = facts.pages(options)
    is_online = project.folder is None
    run = module.init(
        entity=project.entity,
        project=project.project,
        id=f"dcphub-{facts.identity}",
        name=f"{facts.run or facts.root}: {facts.name}",
        resume="allow",
        job_type="handover",
        mode="online" if is_online else "offline",
        dir=str(folder),
        config={**facts.content, **{f"{name}_page": url for name, url in pages.items()}},
        settings=_settings(module, project),
    )
    try:
        artifact = _artifact(module, options, project, facts, reference)
        aliases = [] if facts.step is None else [f"step-{facts.step}"]
        logged = run.log_artifact(artifact, aliases=[*aliases, *map(_alias, facts.aliases)])
        run.summary.update(dict(facts.metrics))
        if not is_online:
            return HandedOver(artifact.name.partition(":")[0], None, None)
        logged.wait(timeout=int(project.seconds) or 1)
        link = str(logged.url or run.url or "")
        is_web = link.startswith(("https://", "http://")) and len(link) <= 2048
        return HandedOver(logged.name.partition(":")[0], logged.version, link if is_web else None)
    finally:
        run.finish()


def _settings(module: Any, project: WandbSettings) -> Any:
    given: dict[str, Any] = {} if project.api_key is None else {"api_key": project.api_key.get_secret_value()}
    return module.Settings(
        base_url=project.base_url,
        init_timeout=project.seconds,
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        **given,
    )


def _artifact(
    module: Any,
    options: HandoverSettings,
    project: WandbSettings,
    facts: CheckpointFacts,
    reference: str,
) -> wandb.Artifact:
    from wandb.sdk.artifacts.artifact_manifest_entry import ArtifactManifestEntry

    pages = facts.pages(options)
    made: wandb.Artifact = module.Artifact(
        model_name(project.name, facts),
        type="model",
        description=f"Checkpoint {facts.key} of root {facts.root}. {pages.get('checkpoint', '')}".strip(),
        metadata={**facts.content, "metrics": dict(facts.metrics), "pages": pages},
    )
    # the artifact's digest includes the identity: another checkpoint at the same URL is another version
    with made.new_file("dcphub.json", encoding="utf-8") as stream:
        json.dump(facts.content, stream, indent=1, sort_keys=True)
    entry: Any = {"path": "checkpoint", "ref": reference, "digest": reference}
    made.manifest.add_entry(ArtifactManifestEntry(**entry))
    return made


def _alias(name: str) -> str:
    return name.replace("/", "-").replace(":", "-")

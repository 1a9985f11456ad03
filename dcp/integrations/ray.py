"""Ray Train: checkpoints in the run's storage, reported by reference, with saves before a preemption."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from dcp.integrations.trainer_state import package_of
from dcp.manager.manager import CheckpointManager
from dcp.ranks.failures import RankFailedError
from dcp.state_dict_saver import SaveFuture
from dcp.storage.errors import CheckpointError, OptionError

with package_of("ray", "Ray Train 2.60"):
    import ray.train
    from ray.train import Checkpoint, CheckpointUploadMode


class RayCheckpointManager(CheckpointManager):
    """`CheckpointManager` for a training function of Ray Train.

    Steps are in the folder ``dcp`` of the run's folder in Ray's ``storage_path``, reachable from all nodes.
    Committed checkpoints are reported to Ray by reference, with metrics, at the next save and at the end.
    All workers must call `save` for the same steps. ``CheckpointConfig(num_to_keep=...)`` decides
    retention, because Ray considers a run without its reported checkpoints corrupted.

    After a preemption notice, the next `save` saves regardless of the interval, waits for the commit and
    reports, once per notice; training continues. Ray is asked every ``agree_every_steps`` steps, which is a
    collective.

    Args:
        **options: Options of `CheckpointManager` except ``root`` and ``keep``.

    Raises:
        OptionError: For ``root`` and ``keep``.
        CheckpointError: For an unknown file system of Ray.

    Examples:
        with RayCheckpointManager(every_steps=100, handle_sigterm=False) as manager:
            restored = manager.restore(state)
    """

    def __init__(self, **options: Any) -> None:
        wrong = [name for name in ("root", "keep") if options.get(name) is not None]
        if wrong:
            raise OptionError(
                f"{' and '.join(wrong)}: not supported, because Ray finds and deletes reported "
                "checkpoints: set RunConfig(storage_path=...) and CheckpointConfig(num_to_keep=...)"
            )
        storage = ray.train.get_context().get_storage()
        super().__init__(_folder_of_the_run(storage), **options)
        self._filesystem = storage.storage_filesystem
        self._ask_every_steps = int(options.get("agree_every_steps", 1))
        self._unreported: tuple[int, SaveFuture, dict[str, Any]] | None = None
        self._preempted: frozenset[str] = frozenset()

    def save(
        self,
        step: int,
        state_dict: dict[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
        **options: Any,
    ) -> SaveFuture | None:
        """Save like `CheckpointManager.save`, and report the previous commit to Ray."""
        is_due = self.should_save(step, last=bool(options.get("last")))  # first: a wrong step raises
        is_urgent = step % self._ask_every_steps == 0 and self._is_preempted()
        if force or is_urgent or is_due:
            self._report()
        future = super().save(step, state_dict, metrics=metrics, force=force or is_urgent, **options)
        if future is not None:
            numbers = {name: float(value) for name, value in (metrics or {}).items()}
            self._unreported = (step, future, numbers)
        if is_urgent:
            self._report()
        return future

    def close(self, timeout_seconds: float | None = None) -> None:
        """Close like `CheckpointManager.close`, after the last report."""
        self._report()
        super().close(timeout_seconds)

    def _report(self) -> None:
        """Report the last save to Ray, unless failed, which holds on all ranks."""
        unreported, self._unreported = self._unreported, None
        if unreported is None:
            return
        step, future, metrics = unreported
        try:
            future.result()
        except (CheckpointError, RankFailedError):  # the manager reports it
            return
        path = str(self.checkpoint_id(step)).removeprefix("s3://")
        ray.train.report(
            {"step": step, **metrics},
            checkpoint=Checkpoint(path, filesystem=self._filesystem),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )

    def _is_preempted(self) -> bool:
        """Return True for a new preemption notice of Ray: a collective."""
        info = ray.train.get_preemption_info()
        nodes = frozenset(info.preempted_node_ids) if info is not None else frozenset()
        is_new = not nodes <= self._preempted
        self._preempted |= nodes
        return is_new

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._unreported = None  # other workers may be gone, and a report waits for them
        super().__exit__(kind, error, trace)


def _folder_of_the_run(storage: Any) -> str:
    path, kind = storage.build_checkpoint_path_from_name("dcp"), storage.storage_filesystem.type_name
    if kind == "local":
        return str(path)
    if kind == "s3":
        return f"s3://{path}"
    raise CheckpointError(
        f"Ray's storage_path is on a {kind!r} file system; supported are local file systems and S3"
    )

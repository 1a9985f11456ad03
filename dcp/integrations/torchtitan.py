"""torchtitan: a checkpoint manager that saves and resumes through dcp.

    checkpoint=DcpCheckpointManager.Config(enable=True, interval=500)  # in a config of torchtitan 0.3

Before 0.3, use this class instead of ``torchtitan.components.checkpoint.CheckpointManager`` in the trainer,
with the same arguments. Checkpoints have torchtitan's names and folders, so both managers read those of the
other.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from dcp.errors import CheckpointError, MissingKeyError, OptionError, UnexpectedKeyError
from dcp.integrations.random_state import RandomState
from dcp.integrations.trainer_state import package_of
from dcp.manager.manager import CheckpointManager as Manager
from dcp.manager.retention import Retention
from dcp.ranks.failures import causes_of
from dcp.state_dict_loader import load
from dcp.state_dict_saver import save

if TYPE_CHECKING:
    from dcp.background.writers import SaveFuture

    _Base: Any  # torchtitan has no type annotations
else:
    with package_of("torchtitan", own_only=True):
        try:
            from torchtitan.components.checkpointer import CheckpointManager as _Base
        except ModuleNotFoundError as missing:
            if missing.name != "torchtitan.components.checkpointer":
                raise
            from torchtitan.components.checkpoint import CheckpointManager as _Base

_MODEL = "model"
_RANDOM = "random_state"
_MODES: Final[dict[str, Literal["sync", "thread", "process"]]] = {
    "disabled": "sync",
    "async": "thread",
    "async_with_pinned_mem": "process",
}
_DATALOADER = (
    "If the key is the data loader's: torchtitan's data loader cannot resume with another data-parallel "
    "degree; set exclude_from_loading=['dataloader']. If all keys but the model's are missing: the "
    "checkpoint is the last of a finished run, saved with last_save_model_only: set an older load_step."
)


class DcpCheckpointManager(_Base):  # type: ignore[misc]
    """torchtitan's checkpoint manager, based on `dcp.CheckpointManager`.

    Fields of the config have torchtitan's meaning. ``async_mode`` is "disabled" (save in the loop), "async"
    (thread) or "async_with_pinned_mem" (copy during the next forward and backward, write in a process).
    Damaged steps are skipped, ``keep_latest_k`` counts valid ones, and each rank restores its random
    generators. torchtitan itself reads and writes Hugging Face formats. A failed save is raised by the next
    one.

    Args:
        config: torchtitan's, or this class's own `Config`.
        checkpoint_config: Name of ``config`` before 0.3.
        catalog: As for `dcp.CheckpointManager`.

    Other arguments are torchtitan's.

    Raises:
        OptionError: For an unknown ``async_mode``, and with torchft's manager.
    """

    if hasattr(_Base, "Config"):

        @dataclass(kw_only=True, slots=True)
        class Config(_Base.Config):  # type: ignore[misc]
            """Config of torchtitan, with the URL of a service (``dcp serve``) that lists each step."""

            catalog: str | None = None

    def __init__(
        self, config: Any = None, *, checkpoint_config: Any = None, catalog: str | None = None, **parts: Any
    ) -> None:
        name, given = ("config", config) if config is not None else ("checkpoint_config", checkpoint_config)
        ft = parts.get("ft_manager")
        if ft is not None and ft.enabled:
            raise OptionError("DcpCheckpointManager does not support torchft: use torchtitan's own manager")
        if given.async_mode not in _MODES:
            raise OptionError(f"async_mode must be one of {', '.join(_MODES)}, not {given.async_mode!r}")
        # disables torchtitan's own threads and groups
        super().__init__(**{name: replace(given, async_mode="disabled", keep_latest_k=0)}, **parts)
        self._manager: Manager | None = None
        if not self.enable:
            return
        self._overlaps = given.async_mode == "async_with_pinned_mem"
        self.states[_RANDOM] = RandomState()
        self._manager = Manager(
            self.folder,
            mode=_MODES[given.async_mode],
            name="step-{step}",
            keep=Retention(last=given.keep_latest_k) if given.keep_latest_k else None,
            on_failure="raise",
            handle_sigterm=False,  # the trainer's loop cannot end early
            catalog=catalog or getattr(given, "catalog", None),
        )

    @torch.no_grad()
    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if due, and return True if saved."""
        is_first = curr_step == 1 and self.enable_first_step_checkpoint
        is_due = last_step or is_first or curr_step % self.interval == 0
        if self._manager is None or self.load_only or not is_due:
            return False
        if last_step and self.last_save_model_only:
            self._save_model(curr_step)
            return True
        overlaps = self._overlaps and not last_step
        future = self._manager.save(curr_step, self._all_states(), last=last_step, overlap=overlaps)
        self.save_future: SaveFuture | None = future
        self.staging_future = None if future is None else future.staging_completion
        return True

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """Restore ``step`` (-1: the newest valid one, else ``initial_load_path``); return True if
        restored.
        """
        if self._manager is None:
            return False
        newest = self._find_load_step() if step == -1 else step
        if newest == -1:
            before: Any = super()
            hook = before._load if hasattr(before, "_load") else before.load
            return bool(hook(-1))  # checkpoints named by initial_load_path and similar options
        unknown = sorted(set(self.exclude_from_loading) - set(self.states))
        if unknown:
            raise OptionError(f"exclude_from_loading: {unknown[0]!r} is not one of {', '.join(self.states)}")
        model_only = newest == 0  # a seed checkpoint
        state = self._model() if model_only else self._all_states(self.exclude_from_loading)
        try:
            self._manager.restore(state, step=None if step == -1 else step, per_rank="keep")
        except CheckpointError as error:
            is_of_loader = "dataloader" in [getattr(one, "facts", {}).get("key") for one in causes_of(error)]
            if is_of_loader or isinstance(error, MissingKeyError | UnexpectedKeyError):
                error.add_note(_DATALOADER)
            raise
        self.states[_MODEL].load_state_dict(state)
        return True

    def maybe_wait_for_staging(self) -> None:
        """Return when the parameters may change."""
        staging, self.staging_future = getattr(self, "staging_future", None), None
        if staging is not None:
            staging.result()

    def close(self) -> None:
        """Wait for pending saves, only briefly after an exception of the training."""
        manager, self._manager = getattr(self, "_manager", None), None
        if manager is not None:
            manager.__exit__(*sys.exc_info())

    # names of these hooks in torchtitan 0.3
    _save, _load, _maybe_wait_for_staging, _close = save, load, maybe_wait_for_staging, close

    def _wait_for_saving(self) -> None:
        saving, self.save_future = self.save_future, None
        if saving is not None:
            saving.result()

    def _find_load_step(self, folder: str = "") -> int:
        """Return the newest committed step; -1 without one."""
        newest = self._open().latest()
        return -1 if newest is None else newest

    # -- used by torchtitan's own saves and loads ------------------------------------------------------------

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any = None,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save ``state_dict`` synchronously; torchtitan itself writes Hugging Face formats."""
        if to_hf:
            disabled = type(self.async_mode)("disabled")
            return super().dcp_save(state_dict, checkpoint_id, disabled, enable_garbage_collection, to_hf)
        return save(state_dict, checkpoint_id=checkpoint_id)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load a checkpoint of dcp or stock torch and set the model's part; torchtitan itself loads other
        formats.
        """
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, checkpoint_id=checkpoint_id, per_rank="keep")
        self.states[_MODEL].load_state_dict(state_dict)

    def _open(self) -> Manager:
        if self._manager is None:
            raise OptionError("this checkpoint manager is disabled or closed")
        return self._manager

    def _model(self) -> dict[str, Any]:
        return dict(self.states[_MODEL].state_dict())

    def _all_states(self, without: list[str] | None = None) -> dict[str, Any]:
        """Return all states in torchtitan's form: the model's entries beside the other objects."""
        others = {key: value for key, value in self.states.items() if key not in (_MODEL, *(without or ()))}
        return others | self._model()

    def _save_model(self, step: int) -> None:
        """Save only the model, in ``export_dtype``, at the end of a run."""
        manager = self._open()
        manager.wait()
        model = {
            name: value.to(self.export_dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in self._model().items()
        }
        self.dcp_save(model, manager.checkpoint_id(step), to_hf=self.last_save_in_hf)

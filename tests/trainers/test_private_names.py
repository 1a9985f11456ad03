"""Names that frameworks keep to themselves are in the installed versions as the plug-ins use them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.support.crashes import in_lab


def private_names() -> None:
    """In the laboratory: what is overridden and used is there in the installed versions."""
    from accelerate import Accelerator
    from transformers import Trainer

    from dcp.integrations.accelerate import PRIVATE_ATTRIBUTES
    from dcp.integrations.huggingface import PRIVATE_HOOKS, DcpTrainerMixin

    for name, parameters in PRIVATE_HOOKS.items():
        assert tuple(inspect.signature(getattr(Trainer, name)).parameters) == parameters
        assert tuple(inspect.signature(getattr(DcpTrainerMixin, name)).parameters) == parameters
    source = inspect.getsource(Trainer)
    for attribute in ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged"):
        assert f"self.{attribute} = " in source
    accelerator = Accelerator(cpu=True)
    assert not [name for name in PRIVATE_ATTRIBUTES if not hasattr(accelerator, name)]


@pytest.mark.exhaustive
def test_the_installed_versions_have_the_private_names_that_are_used() -> None:
    """Each is named in one place, with its parameters."""
    in_lab(private_names)


def test_names_of_lightnings_own_are_those_of_the_installed_version() -> None:
    """They are not documented."""
    from lightning.fabric.utilities.load import _METADATA_FILENAME
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

    from dcp.integrations import lightning as names

    assert names.LAST == ModelCheckpoint.CHECKPOINT_NAME_LAST
    assert names.SHARDS == _METADATA_FILENAME
    path = _CheckpointConnector.hpc_save_path("/nowhere")
    assert Path(path).name.startswith(names.BEFORE_REQUEUE)

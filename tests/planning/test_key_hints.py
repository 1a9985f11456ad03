"""Missing keys: the error suggests the intended names, and a renaming that finds all keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp

LAYERS = [f"model.layers.{n}.{part}.weight" for n in range(12) for part in ("linear1", "linear2", "norm1")]


def hint(folder: Path, wanted: list[str], stored: list[str], **options: Any) -> str:
    """Return the error of a load of ``wanted`` from a checkpoint of ``stored``."""
    dcp.save({name: torch.zeros(1) for name in stored}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(dcp.MissingKeyError) as caught:
        dcp.load({name: torch.zeros(1) for name in wanted}, checkpoint_id=folder, no_dist=True, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("model.layers.0.linear1.weigth", "model.layers.0.linear1.weight"),
        ("model.layer.3.linear1.weight", "model.layers.3.linear1.weight"),
        ("Model.layers.3.linear1.weight", "model.layers.3.linear1.weight"),
        ("layers.3.linear1.weight", "model.layers.3.linear1.weight"),
        ("net.layers.3.norm1.weight", "model.layers.3.norm1.weight"),
    ],
)
def test_the_right_name_is_suggested_for_a_key(name: str, meant: str, tmp_path: Path) -> None:
    """A misspelled part anywhere, or another prefix, is suggested; allow_partial_load is not."""
    message = hint(tmp_path, [name, "step"], [*LAYERS, "step"])
    assert f"Did you mean {meant!r}" in message and "allow_partial_load" not in message


@pytest.mark.parametrize(
    ("wanted", "stored"),
    [
        ("module.{}", "{}"),
        ("{}", "module.{}"),
        ("model.module.{}", "model.{}"),
        ("_orig_mod.{}", "{}"),
        ("model.{}", "model._orig_mod.{}"),
        ("{}", "transformer.{}"),
    ],
)
def test_the_suggested_rename_works_as_pasted(wanted: str, stored: str, tmp_path: Path) -> None:
    """For wrappers on one side and for other prefixes the suggested rename= works when pasted."""
    missing, unused = ([form.format(name) for name in LAYERS] for form in (wanted, stored))
    message = hint(tmp_path, missing, unused)
    rules = re.search(r"The checkpoint has all of them under other names: pass rename=(\{.*\})", message)
    assert rules is not None, message
    state = {name: torch.ones(1) for name in missing}
    dcp.load(state, checkpoint_id=tmp_path, rename=eval(rules[1]), no_dist=True)
    assert not any(tensor.item() for tensor in state.values())


def test_names_with_the_same_shape_come_first(tmp_path: Path) -> None:
    """Suggestions for a key and for rename= prefer the same shape, and show both shapes if they differ."""
    small = ("encoder.up.weight", "encoder.down.weight")
    stored = {name: torch.zeros(1, 4) for name in small} | {
        name.replace("encoder", "decoder"): torch.zeros(4, 4) for name in small
    }
    dcp.save(stored, checkpoint_id=tmp_path, no_dist=True)

    def message_for(*wanted: str, shape: tuple[int, ...] = (4, 4)) -> str:
        with pytest.raises(dcp.MissingKeyError) as caught:
            dcp.load({name: torch.zeros(shape) for name in wanted}, checkpoint_id=tmp_path, no_dist=True)
        return str(caught.value)

    assert "Did you mean 'decoder.up.weight'?" in message_for("encode.up.weight")
    assert "'encoder.up.weight' (saved (1, 4), current (3,))" in message_for("encode.up.weight", shape=(3,))
    assert 'pass rename={"^": "decoder."}.' in message_for("up.weight", "down.weight")
    odd = message_for("up.weight", "down.weight", shape=(3,))
    assert (
        'pass rename={"^": "encoder."}. With another shape:' in odd and "(saved (1, 4), current (3,))" in odd
    )


def test_with_rename_given_a_rule_is_suggested(tmp_path: Path) -> None:
    """With rename= given the suggestion is a rule to add to it."""
    message = hint(tmp_path, [f"module.{name}" for name in LAYERS], LAYERS, rename={"^nothing": ""})
    assert 'add {r"^module\\.": ""} to rename' in message


def test_without_similar_names_stored_names_are_listed(tmp_path: Path) -> None:
    """Without similar names the error lists the stored names, and suggests allow_partial_load=True."""
    assert re.search(
        r"state dict lacks: model\.\* \(36\)\..*allow_partial_load=True", hint(tmp_path, ["qqq"], LAYERS)
    )

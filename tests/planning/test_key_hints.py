from __future__ import annotations

import re

import pytest

from dcp.planners.load.key_hints import hint_for_missing
from dcp.storage.near_names import near_names

LAYERS = [f"model.layers.{n}.{part}.weight" for n in range(12) for part in ("linear1", "linear2", "norm1")]


def hint(missing: list[str], unused: list[str], found: tuple[str, ...] = ("step",)) -> str:
    """For a load without rename."""
    return hint_for_missing(missing, unused, found, is_renamed=False)


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
def test_one_key_gets_the_name_that_was_meant(name: str, meant: str) -> None:
    """A part that is misspelt, wherever it is, and another beginning."""
    assert near_names(name, LAYERS)[0] == meant
    assert hint([name], LAYERS).startswith(f"Did you mean {meant!r}")


@pytest.mark.parametrize(
    ("wanted", "stored", "rules"),
    [
        ("module.{}", "{}", '{r"^module\\.": ""}'),
        ("{}", "module.{}", '{r"^model\\.": "module.model."}'),
        ("model.module.{}", "model.{}", '{r"\\bmodule\\.": ""}'),
        ("_orig_mod.{}", "{}", '{r"^_orig_mod\\.": ""}'),
        ("model.{}", "model._orig_mod.{}", '{r"^((?:[^.]+\\.){1})": r"\\1_orig_mod."}'),
        ("{}", "transformer.{}", '{r"^": "transformer."}'),
    ],
)
def test_the_renaming_that_finds_all_is_told(wanted: str, stored: str, rules: str) -> None:
    """Wrappers that only one of the two has, and other beginnings; what is told works when it is pasted."""
    missing, unused = ([form.format(name) for name in LAYERS] for form in (wanted, stored))
    text = hint(missing, unused, found=())
    assert text.startswith("It has them all under other names: pass rename=")
    renamed = missing
    for regex, replacement in eval(text.partition("rename=")[2].rstrip(".")).items():
        renamed = [re.sub(regex, replacement, name) for name in renamed]
    assert renamed == unused


def test_no_renaming_that_would_lose_what_is_found() -> None:
    """A rule for all keys would take away the names that are there."""
    missing = [name.removeprefix("model.") for name in LAYERS]
    text = hint(missing, LAYERS, found=("layer_count", "step"))
    renamed = "rename=" in text and eval(text.partition("rename=")[2].rstrip("."))
    assert not renamed or all(re.sub(regex, text, "step") == "step" for regex, text in renamed.items())


def test_where_rename_is_given_the_rule_is_to_be_added() -> None:
    """The names that were looked for are those it gave."""
    text = hint_for_missing([f"module.{n}" for n in LAYERS], LAYERS, (), is_renamed=True)
    assert 'add {r"^module\\.": ""} to rename' in text


def test_keeping_what_is_missing_is_advised_only_where_nothing_is_near() -> None:
    """It would hide a wrong name."""
    assert "allow_partial_load" not in hint(["model.layers.0.linear1.weigth"], LAYERS)
    assert hint(["qqq"], LAYERS) == (
        "It has model.* (36) besides; dcp show lists all. "
        "What it lacks may stay as it is with allow_partial_load=True."
    )

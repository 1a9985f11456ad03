"""Rules: which events and checkpoints they are for, the jobs they make, once each, and by what they end."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file
from sqlalchemy import select

import dcp
from dcp.server.automation.actions import Action, Condition, expand_key
from dcp.server.automation.periodic import consume_events, has_events
from dcp.server.automation.rules import NewRule, RuleRow, create_rule, update_rule
from dcp.server.catalog.labelling.labels import Change, add_tags
from dcp.server.database.engine import Database
from dcp.server.database.tables import audit, jobs
from tests.support.kind_runs import KindRuns

_ACTIONS: TypeAdapter[tuple[Action, ...]] = TypeAdapter(tuple[Action, ...])
_VERIFY = {"kind": "verify"}
_CONVERT = {
    "kind": "convert",
    "to": "safetensors",
    "target_root": "export",
    "target_key": "{run}/{name}.safetensors",
}


@pytest.fixture
def runs(database: Database, tmp_path: Path) -> KindRuns:
    """Two empty local roots."""
    for name in ("main", "export"):
        (tmp_path / name).mkdir()
    roots = {name: {"url": str(tmp_path / name)} for name in ("main", "export")}
    return KindRuns(database, tmp_path / "work", roots)


def rule(
    runs: KindRuns, *actions: Any, event: str = "checkpoint.committed", name: str = "r", **condition: Any
) -> RuleRow:
    """A rule, made a while ago."""
    new = NewRule(
        name=name,
        is_enabled=True,
        event=event,
        condition=Condition.model_validate(condition),
        actions=_ACTIONS.validate_python(list(actions), strict=False),
    )
    return runs.database.transact(lambda connection: create_rule(connection, new, time.time() - 100.0))


def save(tmp_path: Path, key: str, value: float = 1.0) -> None:
    """A checkpoint in the first root."""
    dcp.save({"w": torch.full((10,), value)}, checkpoint_id=tmp_path / "main" / key, no_dist=True)


def consume(runs: KindRuns) -> int:
    """What a worker does now and then."""
    return consume_events(runs.database, runs.settings, time.time())


def jobs_of(runs: KindRuns) -> list[tuple[str, str]]:
    """(kind, who made it) of all jobs but scans."""
    rows = runs.all(select(jobs).where(jobs.c.kind != "scan").order_by(jobs.c.id))
    return [(row.kind, row.created_by) for row in rows]


def tag(runs: KindRuns, key: str, name: str) -> None:
    """Give a tag."""
    number = runs.id("main", key)
    runs.database.transact(lambda connection: add_tags(connection, number, [name], Change(actor="me")))


def test_commit_to_converted_and_verified(runs: KindRuns, tmp_path: Path) -> None:
    """What is committed is verified and converted under another root; the target is not converted again."""
    rule(runs, _VERIFY, _CONVERT)
    save(tmp_path, "llama/step-10", 3.0)
    runs.scan("main")
    assert consume(runs) == 2
    assert jobs_of(runs) == [("verify", "rule:r"), ("convert", "rule:r")]
    runs.drain()
    assert torch.equal(load_file(tmp_path / "export/llama/step-10.safetensors")["w"], torch.full((10,), 3.0))
    assert runs.row("main", "llama/step-10").verification == "good"
    assert consume(runs) == 1  # the target is verified as well, and not converted again
    runs.drain()
    assert consume(runs) == 0
    assert [kind for kind, _ in jobs_of(runs)] == ["verify", "convert", "verify"]
    assert runs.row("export", "llama/step-10.safetensors").verification == "good"


@pytest.mark.parametrize(
    ("condition", "keys"),
    [
        ({}, ["a/step-10", "a/step-15", "b/c/step-10"]),
        ({"run": "a"}, ["a/step-10", "a/step-15"]),
        ({"run": "b*"}, ["b/c/step-10"]),
        ({"every_steps": 10}, ["a/step-10", "b/c/step-10"]),
        ({"formats": ["torch_save"]}, []),
        ({"formats": ["dcp", "torch_dcp"], "every_steps": 15}, ["a/step-15"]),
        ({"root": "export"}, []),
        ({"root": "main", "run": "a", "every_steps": 5}, ["a/step-10", "a/step-15"]),
        ({"tag": "keep"}, []),
    ],
)
def test_conditions(condition: dict[str, Any], keys: list[str], runs: KindRuns, tmp_path: Path) -> None:
    """All that is given must hold."""
    rule(runs, _VERIFY, **condition)
    for key in ("a/step-10", "a/step-15", "b/c/step-10"):
        save(tmp_path, key)
    runs.scan("main")
    consume(runs)
    made = runs.all(select(jobs.c.checkpoint_id).where(jobs.c.kind == "verify"))
    assert sorted(row.checkpoint_id for row in made) == sorted(runs.id("main", key) for key in keys)


def test_a_tag_that_comes_later(runs: KindRuns, tmp_path: Path) -> None:
    """On commit of a checkpoint with a tag: also if it gets the tag after that, but not for other tags."""
    rule(runs, _VERIFY, tag="release")
    save(tmp_path, "a/step-1")
    runs.scan("main")
    tag(runs, "a/step-1", "other")
    assert consume(runs) == 0
    tag(runs, "a/step-1", "release")
    assert consume(runs) == 1
    runs.drain()
    tag(runs, "a/step-1", "third")
    assert consume(runs) == 0


def test_other_events(runs: KindRuns, tmp_path: Path) -> None:
    """What is converted only once it has been verified; and what is done on a tag."""
    rule(runs, _VERIFY, name="first")
    rule(runs, _CONVERT, event="checkpoint.verified", name="second")
    rule(runs, {"kind": "stats"}, event="checkpoint.tagged", tag="look", name="third")
    save(tmp_path, "a/step-1")
    runs.scan("main")
    assert consume(runs) == 1
    runs.drain()
    assert consume(runs) == 1
    tag(runs, "a/step-1", "look")
    assert consume(runs) == 1
    assert jobs_of(runs) == [("verify", "rule:first"), ("convert", "rule:second"), ("stats", "rule:third")]


def test_only_what_happens_from_then_on(runs: KindRuns, tmp_path: Path) -> None:
    """Neither a new rule nor one that was enabled is for what has been."""
    save(tmp_path, "a/step-1")
    runs.scan("main")
    made = rule(runs, _VERIFY)
    later = time.time() + 10
    with runs.database.write() as connection:
        update_rule(connection, made.id, {"is_enabled": True}, later)
    assert consume(runs) == 0
    with runs.database.read() as connection:
        assert not has_events(connection, later)


def test_no_event_is_dealt_with_twice(runs: KindRuns, tmp_path: Path) -> None:
    """Several workers at once make each job once."""
    rule(runs, _VERIFY)
    for step in range(5):
        save(tmp_path, f"a/step-{step}")
    runs.scan("main")
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(consume(runs))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(counts) == 5 and len(jobs_of(runs)) == 5


def test_what_a_rule_cannot_do_is_told(runs: KindRuns, tmp_path: Path) -> None:
    """A target that is taken, or a key that cannot be made, stops neither other actions nor other events."""
    rule(runs, _CONVERT | {"target_key": "same.safetensors"}, _VERIFY)
    rule(runs, _CONVERT | {"target_key": "{step}.safetensors"}, name="s", formats=["torch_save"])
    save(tmp_path, "a/step-1")
    runs.scan("main")
    consume(runs)
    runs.drain()
    save(tmp_path, "a/step-2")
    torch.save({"w": torch.ones(2)}, tmp_path / "main/a/best.pt")
    runs.scan("main")
    consume(runs)
    refused = runs.all(select(audit).where(audit.c.action == "rule.refused").order_by(audit.c.id))
    told = {(row.actor, row.detail["problem"]) for row in refused}
    assert any(actor == "rule:r" and "same.safetensors is a checkpoint already" in why for actor, why in told)
    assert ("rule:s", "target_key: the checkpoint has no step") in told
    verified = runs.all(select(jobs.c.checkpoint_id).where(jobs.c.kind == "verify"))
    assert runs.id("main", "a/step-2") in {row.checkpoint_id for row in verified}


def test_keys_of_targets() -> None:
    """Fields are filled in, and nothing else is."""
    fields = {"root": "m", "run": "", "name": "x.pt", "stem": "x", "id": 3}
    assert expand_key("{run}/{stem}.safetensors", fields) == "x.safetensors"
    assert expand_key("out/{root}-{id}/{name}", fields) == "out/m-3/x.pt"
    for template in ("{step}", "{other}", "{run", "}{", "{}", "{name.__class__}", "{name!r}", "{{run}}"):
        with pytest.raises(ValueError, match="target_key"):
            expand_key(template, fields)


@pytest.mark.parametrize(
    "change",
    [
        {"target_key": "{nothing}.safetensors"},
        {"target_key": "x.pt"},
        {"to": "numpy"},
        {"dtype": "int8"},
        {"checkpoint_id": 1},
        {"kind": "purge"},
    ],
)
def test_actions_that_cannot_be_meant(change: dict[str, Any]) -> None:
    """They are refused when the rule is made."""
    _ACTIONS.validate_python([_CONVERT])
    with pytest.raises(ValidationError):
        _ACTIONS.validate_python([_CONVERT | change])

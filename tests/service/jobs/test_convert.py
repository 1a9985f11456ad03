"""Conversions as jobs: on local and S3 roots, registered with their origin, once, whatever is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dcp
from tests.support.job_site import JobSite, RefusedError
from tests.support.s3 import S3Server, raw_s3


def given(site: JobSite, **changes: Any) -> dict[str, Any]:
    """A conversion of ``run/step-5``."""
    plain = {"to": "torch", "target_root": "export", "target_key": "a/x.pt"}
    return {"checkpoint_id": site.id("main", "run/step-5"), **plain, **changes}


def check_target(site: JobSite, key: str, result: Any) -> None:
    """It is in the catalog with its origin and structure, once."""
    row, source = site.found("export", key), site.id("main", "run/step-5")
    assert (row.state, row.step) == ("committed", 5)
    assert row.tensor_count == 2
    assert (row.bytes, row.file_count) == (result["bytes_written"], result["file_count"])
    assert site.edges(row.id) == [(row.id, source, "converted_from")]
    assert len(site.audited("checkpoint.convert", row.id)) == 1
    assert len(site.api.checkpoints(state="any", root="export")) == 1
    assert site.result("verify", checkpoint_id=row.id)["outcome"] == "good"


@pytest.mark.parametrize(
    ("to", "key"),
    [
        ("safetensors", "a/step-5.safetensors"),
        ("safetensors", "a/step-5"),
        ("torch", "step-5.pt"),
        ("dcp", "b/c/5"),
    ],
)
def test_to_another_root(to: str, key: str, local: JobSite, tmp_path: Path, state: dict[str, Any]) -> None:
    """Writes each format so that it loads elsewhere, with nothing beside it."""
    result = local.result("convert", **given(local, to=to, target_key=key, tags=["made"]))
    target = tmp_path / "export" / key
    if to == "safetensors":
        found: Any = load_file(target if target.is_file() else target / "model.safetensors")
    else:
        found = torch.load(target, weights_only=True) if to == "torch" else dcp.read(target)
    assert torch.equal(found["weight"], state["weight"]) and found["bias"].dtype == torch.bfloat16
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    check_target(local, key, result)
    assert local.found("export", key).tags == ["made"]
    assert str(tmp_path) not in json.dumps(result)


def test_two_publishers_at_once(local: JobSite) -> None:
    """Makes one target although a worker that was believed dead publishes beside its successor."""
    number = local.submit("convert", **given(local, to="dcp", target_key="x"))
    local.step("plan")
    local.step("task")
    made = local.next("publish")
    first, second = local.worker.carry_out(made), local.worker.carry_out(made)
    assert first["target"]["save_id"] == second["target"]["save_id"]
    local.worker.complete(made, second)
    local.worker.drain()
    check_target(local, "x", local.job(number).result)


def check_cancelled(site: JobSite) -> None:
    """A job that is cancelled behind its tasks leaves the place free for another one."""
    params = given(site, to="safetensors", target_key="x.safetensors")
    number = site.submit("convert", **params)
    site.step("plan", "task")
    site.cancel(number)
    site.worker.drain()
    assert site.job(number).state == "cancelled"
    check_target(site, "x.safetensors", site.result("convert", **params))


def test_a_cancelled_one_leaves_nothing(local: JobSite, tmp_path: Path) -> None:
    """Clears away what its tasks wrote."""
    check_cancelled(local)
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["x.safetensors"]


def test_a_cancelled_one_leaves_no_object(on_s3: JobSite, s3_server: S3Server, s3_root: str) -> None:
    """Clears away what its tasks wrote to a bucket."""
    check_cancelled(on_s3)
    with raw_s3(s3_server) as raw:
        assert list(raw.list(f"{s3_root}/export")) == ["x.safetensors"]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_plan_that_comes_too_late_leaves_nothing(is_told: bool, local: JobSite, tmp_path: Path) -> None:
    """Clears away what a plan has reserved that was cancelled meanwhile, whether its worker ends or dies."""
    shards = given(local, to="safetensors", target_key="a/x", shard_bytes=1 << 20)
    number = local.submit("convert", **shards)
    made = local.next("plan")
    answer = local.worker.carry_out(made)
    assert list((tmp_path / "export/a").glob(".tmp-convert-*"))
    local.cancel(number)
    if is_told:
        local.worker.complete(made, answer)
    else:
        local.lose(made)
    local.worker.drain()
    assert local.job(number).state == "cancelled"
    assert list((tmp_path / "export/a").iterdir()) == []


def test_plans_that_are_lost_again_and_again_leave_nothing(local: JobSite, tmp_path: Path) -> None:
    """Clears away what all attempts have reserved once the job has failed."""
    shards = given(local, to="safetensors", target_key="a/x", shard_bytes=1 << 20)
    number = local.submit("convert", **shards)
    while (made := local.worker.claim()) is not None and made.phase == "plan":
        local.worker.carry_out(made)
        local.worker.complete(made, RuntimeError("it broke"))
    assert made is not None and made.phase == "discard"
    local.worker.complete(made, local.worker.carry_out(made))
    assert local.job(number).state == "failed"
    assert list((tmp_path / "export/a").iterdir()) == []


def test_what_is_there_stays(local: JobSite, tmp_path: Path) -> None:
    """Fails for a file that the catalog does not know, and leaves it alone in its folder."""
    (tmp_path / "export/x.pt").write_bytes(b"mine")
    job = local.do("convert", **given(local, target_key="x.pt"))
    assert (job.state, job.error["type"], job.error["is_retryable"]) == ("failed", "ConflictError", False)
    assert "export:x.pt exists" in job.error["detail"] and str(tmp_path) not in job.error["detail"]
    assert (tmp_path / "export/x.pt").read_bytes() == b"mine"
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["x.pt"]


def test_what_came_meanwhile_stays(on_s3: JobSite, s3_server: S3Server, s3_root: str) -> None:
    """Fails for an object that came into being since the plan, as large as the target, and keeps it."""
    size = on_s3.result("convert", **given(on_s3, target_key="b/x.pt"))["target"]["bytes"]
    number = on_s3.submit("convert", **given(on_s3))
    on_s3.step("plan")
    with raw_s3(s3_server) as raw:
        raw.write(f"{s3_root}/export/a/x.pt", bytes(size))
        on_s3.worker.drain()
        assert on_s3.job(number).state == "failed"
        assert list(raw.list(f"{s3_root}/export/a")) == ["x.pt"]
        assert raw.read(f"{s3_root}/export/a/x.pt") == bytes(size)


def test_refused_targets(local: JobSite, tmp_path: Path) -> None:
    """Refuses other places, sources and what is there before there is a job."""
    dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "main/run/step-6", no_dist=True)
    local.scan("main")
    for params, problem in (
        ({"target_root": "frozen"}, "read-only"),
        ({"target_root": "nowhere"}, "there is no root"),
        ({"target_key": "../x.pt"}, "not allowed"),
        ({"target_key": "/etc/x.pt"}, "not allowed"),
        ({"target_key": "a%2f..%2fx.pt"}, "not allowed"),
        ({"target_root": "main", "target_key": "run/step-5/x.pt"}, "in the source itself"),
        ({"target_root": "main", "target_key": "run/step-5", "to": "dcp"}, "in the source itself"),
        ({"target_root": "main", "target_key": "run/step-6/x.pt"}, "checkpoint already"),
    ):
        with pytest.raises(RefusedError, match=problem):
            local.submit("convert", **given(local, **params))
    assert local.jobs() == []


def test_parameters_that_cannot_be_meant(local: JobSite) -> None:
    """Refuses them when they are given, not when the job runs, with a problem document."""
    turned = {"map": "llama:hf-to-titan"}
    wrong: list[dict[str, Any]] = [
        *({"target_key": key} for key in ("x.safetensors", "x", ".hidden/x.pt", "run/.x.pt")),
        *({"rename": {old: new}} for old, new in (("(", "x"), ("a", "\\9"))),
        *({"map": "llama:hf-to-titn"}, {"map": "/etc/passwd.json"}, {"map": {"rules": []}}),
        {"map": {"rules": [{"from": "a", "to": "b"}], "name": "x" * (300 << 10)}},
        *({"to": "dcp", "target_key": "x.pt"}, {"to": "numpy"}, {"dtype": "int8"}, {"shard_bytes": 1}),
        *({"files": 0}, {"unknown": 1}, {"only": []}, {"tags": ["white space"]}, {"inverse": True}),
        *({"below": "model"}, {"sizes": {"heads": 2}}, {"hf_key": "models/first"}, {"hf_root": "main"}),
        *({"hf_also": ["*.py"]}, turned | {"sizes": {"hedas": 2}}, turned | {"sizes": {"inverse": 1}}),
    ]
    number = local.id("main", "run/step-5")
    for params in wrong:
        with pytest.raises(RefusedError) as refused:
            local.submit(
                "convert", None, **{"checkpoint_id": number, "to": "torch", "target_key": "x.pt"} | params
            )
        assert refused.value.status in (413, 422), params
    assert local.jobs() == []


@pytest.mark.parametrize("piece", [r"[\x01-￿a]", r"[\0-\U0010ffffa]", r"(?:[!-￯a])"])
def test_expressions_that_take_long_to_compile_are_refused(piece: str, local: JobSite) -> None:
    """Refuses large sets of characters, which would keep the process that answers others for a minute."""
    many = {piece * (1000 // len(piece)) + "|" * n: "x" for n in range(8)}
    with pytest.raises(RefusedError, match="characters together"):
        local.submit("convert", **given(local, rename=many))
    plain = {r"[^\x00-￿]": "x", r"(?i)[\u0080-\U0010ffff]+": "y", r"layers-\d": "w"}
    local.submit("convert", **given(local, rename=plain))


def test_an_expression_that_never_ends_is_broken_off(local: JobSite, tmp_path: Path) -> None:
    """Fails once, naming the expression, and leaves nothing."""
    dcp.save({"a" * 40 + "!": torch.ones(3)}, checkpoint_id=tmp_path / "main/run/step-6", no_dist=True)
    local.scan("main")
    params = given(local, checkpoint_id=local.id("main", "run/step-6"), rename={"(a+)+$": "b"})
    job = local.do("convert", **params)
    assert (job.state, job.error["type"], job.error["is_retryable"]) == (
        "failed",
        "UnprocessableError",
        False,
    )
    assert "(a+)+$" in job.error["detail"]
    assert not list((tmp_path / "export").glob("**/*.pt*"))


def test_names_are_changed_in_order(local: JobSite, tmp_path: Path) -> None:
    """Applies expressions with groups one after the other, as `dcp.convert` does."""
    rename = {r"^(\w+)$": r"model.\1", r"model\.(?!bias)": "m."}
    local.result("convert", **given(local, rename=rename))
    assert set(torch.load(tmp_path / "export/a/x.pt", weights_only=True)) == {
        "m.weight",
        "model.bias",
        "m.step",
    }


def test_only_what_is_there_is_converted_and_once(local: JobSite, tmp_path: Path) -> None:
    """Joins the job that makes the same target, and refuses a checkpoint that has vanished."""
    assert local.submit("convert", **given(local)) == local.submit("convert", **given(local, tags=["x"]))
    dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "main/run/step-6", no_dist=True)
    local.scan("main")
    gone = local.id("main", "run/step-6")
    for path in (tmp_path / "main/run/step-6").iterdir():
        path.unlink()
    local.scan("main")
    with pytest.raises(RefusedError) as refused:
        local.submit("convert", **given(local, checkpoint_id=gone, target_key="b/x.pt"))
    assert refused.value.status == 409


def test_a_scan_that_has_begun_is_followed_by_another(local: JobSite) -> None:
    """Reads the structure of each target, also where a scan had listed the folder before it was there."""
    local.submit("scan", root="export", below="a")
    assert local.worker.claim() is not None, "and it is at it for long"
    for name in ("first", "second"):
        local.submit("convert", **given(local, to="dcp", target_key=f"a/{name}"))
    local.worker.drain()
    assert [local.found("export", f"a/{name}").tensor_count for name in ("first", "second")] == [2, 2]
    assert len(local.jobs(kind="scan")) <= 3


def test_through_a_weight_map_and_back(local: JobSite, tmp_path: Path, state: dict[str, Any]) -> None:
    """Converts by rules given as data and by their inverse; result, lineage and audit name the map."""
    rules = [
        {"from": {"weight": "(two rows) width"}, "to": {"turned": "width (rows two)"}},
        {"from": "{name:*}", "to": "{name:*}"},
    ]
    turn = {"to": "dcp", "map": {"name": "turn", "rules": rules}}
    result = local.result("convert", **given(local, target_key="there", sizes={"two": 2}, **turn))
    assert result["map"] == "turn"
    wanted = state["weight"].view(2, 10, 30).permute(2, 1, 0).reshape(30, 20)
    assert torch.equal(dcp.read(tmp_path / "export/there")["turned"], wanted)
    there = local.id("export", "there")
    assert [one["map"] for one in local.audited("checkpoint.convert", there)] == ["turn"]
    (edge,) = local.api.get(f"/checkpoints/{there}/lineage")["edges"]
    assert (edge["kind"], edge["map"]) == ("converted_from", "turn")
    back = given(local, checkpoint_id=there, target_key="back", sizes={"two": 2}, inverse=True, **turn)
    assert local.result("convert", **back)["map"] == "turn (inverse)"
    found = dcp.read(tmp_path / "export/back")
    assert torch.equal(found["weight"], state["weight"]) and found["step"] == 5


def test_a_map_that_does_not_fit_makes_nothing(local: JobSite, tmp_path: Path) -> None:
    """Fails, naming the tensor that no rule knows."""
    rules = [{"from": "{name:*}.weight", "to": "{name:*}.w"}]
    job = local.do("convert", **given(local, to="dcp", target_key="no", map={"rules": rules}, below="model"))
    assert (job.state == "failed" and "no rule knows 'bias'" in str(job.error)) or "weight" in str(job.error)
    assert not (tmp_path / "export/no").exists()


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A folder of a model in the root "main", with files that nobody should get."""
    folder = tmp_path / "main/models/first"
    (folder / "additional_chat_templates").mkdir(parents=True)
    files = {"config.json": b'{"dtype": "bfloat16"}', "tokenizer.json": b"x" * 100_000, "merges.txt": b""}
    for name, data in {**files, "evil.py": b"1 / 0", "model.bin": b"evil"}.items():
        (folder / name).write_bytes(data)
    (folder / "additional_chat_templates/tools.jinja").write_text("tools")
    (folder / "vocab.txt").symlink_to("/etc/passwd")
    (folder / "linked").symlink_to("/etc")
    return folder


@pytest.mark.parametrize("also", [None, ["*.py"]])
def test_a_whole_folder_of_hugging_face(
    also: list[str] | None, local: JobSite, template: Path, tmp_path: Path, state: dict[str, Any]
) -> None:
    """Takes known files of a template, others only by their names, and nothing behind a link."""
    more = {"hf_also": also} if also else {}
    local.result(
        "convert", **given(local, to="safetensors", target_key="whole", hf_key="models/first", **more)
    )
    made = tmp_path / "export/whole"
    assert torch.equal(dcp.read(made)["weight"], state["weight"])
    names = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    known = {"config.json", "tokenizer.json", "merges.txt", "additional_chat_templates/tools.jinja"}
    assert names == {"model.safetensors", *known, *(["evil.py"] if also else [])}
    assert all((made / name).read_bytes() == (template / name).read_bytes() for name in known)


def test_templates_that_are_none(local: JobSite, template: Path, tmp_path: Path) -> None:
    """Refuses other roots and places, and fails for a folder without a config."""
    plain = given(local, to="safetensors", target_key="no", hf_key="models/first")
    for wrong in ({"hf_root": "nowhere"}, {"hf_key": "../export"}):
        with pytest.raises(RefusedError):
            local.submit("convert", **plain | wrong)
    job = local.do("convert", **plain | {"hf_key": "run"})
    assert job.state == "failed" and "config.json" in str(job.error)
    assert not (tmp_path / "export/no").exists()

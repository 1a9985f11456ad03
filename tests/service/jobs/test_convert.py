"""Conversion jobs on local and S3 roots: targets, lineage, weight maps, folders of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dcp
from tests.service.jobs.conftest import check_target
from tests.support.job_site import JobSite, RefusedError
from tests.support.s3 import S3Server, raw_s3


def given(site: JobSite, **changes: Any) -> dict[str, Any]:
    """Return parameters of a conversion of ``run/step-5``."""
    plain = {"to": "torch", "target_root": "export", "target_key": "a/x.pt"}
    return {"checkpoint_id": site.id("main", "run/step-5"), **plain, **changes}


@pytest.mark.each_database  # rename rules apply in order, which JSONB would not keep
@pytest.mark.parametrize(
    ("to", "key"), [("safetensors", "a/step-5"), ("torch", "step-5.pt"), ("dcp", "b/c/5")]
)
def test_target_formats(to: str, key: str, local: JobSite, tmp_path: Path, state: dict[str, Any]) -> None:
    """The target loads in each format, alone in its folder; a repeated submission joins the first job."""
    params = given(local, to=to, target_key=key, tags=["made"], rename={r"^w(\w+)$": r"m.w\1", r"^m\.": ""})
    assert local.submit("convert", **params) == local.submit("convert", **params)
    result = local.result("convert", **params)
    target = tmp_path / "export" / key
    if to == "safetensors":
        found: Any = load_file(target / "model.safetensors")
    else:
        found = torch.load(target, weights_only=True) if to == "torch" else dcp.read(target)
    assert torch.equal(found["weight"], state["weight"]) and found["bias"].dtype == torch.bfloat16
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    check_target(local, key, result)
    assert local.found("export", key).tags == ["made"]
    assert str(tmp_path) not in json.dumps(result)


def test_a_cancelled_conversion_leaves_no_object(on_s3: JobSite, s3_server: S3Server, s3_root: str) -> None:
    """A cancelled conversion deletes its objects, and the next conversion may use the target."""
    params = given(on_s3, to="safetensors", target_key="x.safetensors")
    number = on_s3.submit("convert", **params)
    on_s3.step("plan", "task")
    on_s3.cancel(number)
    on_s3.worker.drain()
    assert on_s3.job(number).state == "cancelled"
    on_s3.result("convert", **params)
    with raw_s3(s3_server) as raw:
        assert list(raw.list(f"{s3_root}/export")) == ["x.safetensors"]


@pytest.mark.parametrize("since_the_plan", [False, True])
def test_existing_files_are_kept(since_the_plan: bool, local: JobSite, tmp_path: Path) -> None:
    """A file at the target that the catalog does not know fails the job and is kept."""
    number = local.submit("convert", **given(local, target_key="x.pt"))
    if since_the_plan:
        local.step("plan")
    (tmp_path / "export/x.pt").write_bytes(b"mine")
    local.worker.drain()
    job = local.job(number)
    assert (job.state, job.error["type"], job.error["is_retryable"]) == ("failed", "ConflictError", False)
    assert "export:x.pt" in job.error["detail"] and str(tmp_path) not in job.error["detail"]
    assert (tmp_path / "export/x.pt").read_bytes() == b"mine"
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["x.pt"]


def test_refused_targets(local: JobSite, tmp_path: Path) -> None:
    """Targets in unknown roots, in the source or in another checkpoint are refused before a job exists."""
    dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "main/run/step-6", no_dist=True)
    local.scan("main")
    for params, problem in (
        ({"target_root": "nowhere"}, "not found"),
        ({"target_root": "main", "target_key": "run/step-5/x.pt"}, "inside the source"),
        ({"target_root": "main", "target_key": "run/step-5", "to": "dcp"}, "inside the source"),
        ({"target_root": "main", "target_key": "run/step-6/x.pt"}, "already a checkpoint"),
    ):
        with pytest.raises(RefusedError, match=problem):
            local.submit("convert", **given(local, **params))
    assert local.jobs() == []


def test_invalid_parameters_are_refused(local: JobSite) -> None:
    """Invalid parameters are refused at submission, not when the job runs."""
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


def test_expressions_that_take_long_to_compile_are_refused(local: JobSite) -> None:
    """Large character classes are refused: compiling them would block the process of the API for a minute."""
    piece = r"[\0-\U0010ffffa]"
    many = {piece * (1000 // len(piece)) + "|" * n: "x" for n in range(8)}
    with pytest.raises(RefusedError, match="characters in total"):
        local.submit("convert", **given(local, rename=many))
    plain = {r"[^\x00-￿]": "x", r"(?i)[\u0080-\U0010ffff]+": "y", r"layers-\d": "w"}
    local.submit("convert", **given(local, rename=plain))


@pytest.mark.exhaustive  # waits for the timeout
def test_endless_expressions_fail_the_job(local: JobSite, tmp_path: Path) -> None:
    """A regular expression that does not end fails the job once, with its text, and leaves nothing."""
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


def test_through_a_weight_map_and_back(local: JobSite, tmp_path: Path, state: dict[str, Any]) -> None:
    """A weight map given as data, and its inverse, convert; result, lineage and audit entry have its name."""
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


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """Create a model folder in the root "main", with code, a pickle and links that must not be copied."""
    folder = tmp_path / "main/models/first"
    (folder / "additional_chat_templates").mkdir(parents=True)
    files = {"config.json": b'{"dtype": "bfloat16"}', "tokenizer.json": b"x" * 100_000, "merges.txt": b""}
    for name, data in {**files, "evil.py": b"1 / 0", "model.bin": b"evil"}.items():
        (folder / name).write_bytes(data)
    (folder / "additional_chat_templates/tools.jinja").write_text("tools")
    (folder / "vocab.txt").symlink_to("/etc/passwd")
    (folder / "linked").symlink_to("/etc")
    return folder


def test_known_files_of_a_template_are_copied(
    local: JobSite, template: Path, tmp_path: Path, state: dict[str, Any]
) -> None:
    """Known files of a template folder are copied, other files only by name, and no target of a link."""
    whole = given(local, to="safetensors", target_key="whole", hf_key="models/first")
    known = {"config.json", "tokenizer.json", "merges.txt", "additional_chat_templates/tools.jinja"}
    for made, also in (("whole", {}), ("more", {"hf_also": ["*.py"]})):
        local.result("convert", **whole | also | {"target_key": made})
        files = {path for path in (tmp_path / "export" / made).rglob("*") if path.is_file()}
        names = {path.relative_to(tmp_path / "export" / made).as_posix() for path in files}
        assert names == {"model.safetensors", *known, *(["evil.py"] if also else [])}
    assert torch.equal(dcp.read(tmp_path / "export/whole")["weight"], state["weight"])
    read = {name: (tmp_path / "export/whole" / name).read_bytes() for name in known}
    assert read == {name: (template / name).read_bytes() for name in known}

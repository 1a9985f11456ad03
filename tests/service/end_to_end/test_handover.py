"""Handovers to a real MLflow server and to the files of W&B, by a running service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.app import running_app
from tests.support.catalog import API, Catalog
from tests.support.catalog_api import CatalogApi, create_key
from tests.support.catalog_roots import write_manifest
from tests.support.databases import MakeDatabase
from tests.support.kind_runs import KindRuns
from tests.support.mlflow_server import MlflowServer
from tests.support.receivers import Receiver
from tests.support.service import Service, wait_until

TOKEN: Final = "mlflow-token-9f1c"
KEY: Final = "f" * 40


def handover(api: CatalogApi, number: int, target: str) -> dict[str, Any]:
    """Return the handover of a checkpoint to a target."""
    items = api.get(f"/checkpoints/{number}/handovers")["items"]
    return next(one for one in items if one["target"] == target)


def test_checkpoints_are_handed_over_by_reference(make_database: MakeDatabase, tmp_path: Path) -> None:
    """Handovers register references in MLflow and W&B, by hand, by alias and by stage. A job waits while
    MLflow is down; repeated handovers, also beside another worker, give a single version. Deletions are
    marked, also during the wait. No response, page or log has a credential."""
    mlflow = MlflowServer(tmp_path / "mlflow", TOKEN)
    wandb = tmp_path / "wandb"
    settings = {
        "auth": "keys",
        "database_url": make_database(),
        "poll_seconds": 0.1,
        "roots": {
            "main": {"url": str(tmp_path / "main"), "scan_seconds": 0},
            "other": {"url": str(tmp_path / "other"), "scan_seconds": 0},
        },
        "features": {
            "handover": {
                "public_url": "https://dcp.example.org/",
                "urls": {"main": "s3://bucket/runs/"},
                "allow_private": ["127.0.0.1"],
                "mlflow": {"url": mlflow.url, "token": TOKEN},
                "wandb": {"project": "models", "entity": "lab", "api_key": KEY, "folder": str(wandb)},
                "when": [
                    {"alias": "production", "run": "a/*"},
                    {"event": "stage.promoted", "stage": "staging"},
                ],
            }
        },
    }
    places = (("main", "a/b/step-1"), ("main", "a/b/step-2"), ("other", "c/step-1"), ("main", "d/step-1"))
    for root, key in places:
        write_manifest(tmp_path / root / key, save_id=f"{len(root + key):08x}")
    (tmp_path / "service").mkdir()
    service = Service(tmp_path / "service", settings)
    key = create_key(service, "boss", ["admin"])
    with service, service.client(key) as http:
        api = CatalogApi(http)
        first, second, local, fleeting = (api.register(*one) for one in places)
        http.patch(f"{API}/checkpoints/{first}/metrics", json={"metrics": {"val/loss": 0.25}})
        assert handover(api, first, "mlflow")["state"] == "none"
        job = api.post(f"/checkpoints/{first}/handovers", {"target": "mlflow"})["id"]
        shown = wait_until(
            lambda: (one := handover(api, first, "mlflow"))["error"] and one, "the job waits for MLflow"
        )
        assert (shown["state"], shown["job_id"], "127.0.0.1 is unreachable" in shown["error"]) == (
            *("waiting", job),
            True,
        )
        assert shown["next_attempt_at"]
        waiting = http.get(f"/checkpoints/{first}", headers={"Accept": "text/html"})
        gone = api.post(f"/checkpoints/{fleeting}/handovers", {"target": "mlflow"})["id"]
        wait_until(lambda: api.job(gone)["waiting"], "it waits as well")
        http.patch(f"{API}/checkpoints/{first}/metrics", json={"metrics": {"late": 0.5}})
        assert http.delete(f"{API}/checkpoints/{fleeting}").is_success
        with mlflow:
            for waits in (job, gone):
                http.post(f"{API}/jobs/{waits}/retry")  # refused if just retried
                api.finished(waits)
            assert mlflow.versions("main.d") == [], "it was deleted before"
            tag = {
                "key": "dcphub.identity",
                "value": mlflow.versions("main.a.b")[0]["tags"]["dcphub.identity"],
            }
            mlflow.call("model-versions/create", name="main.a.b", source="s3://bucket/late", tags=[tag])
            again = api.post(f"/checkpoints/{first}/handovers", {"target": "mlflow"})["id"]
            assert again != job
            api.finished(again)
            (version,) = mlflow.versions("main.a.b")
            assert version["source"] == "s3://bucket/runs/a/b/step-1"
            assert (
                version["run_link"]
                == f"https://dcp.example.org/runs/{api.get(f'/checkpoints/{first}')['run_id']}"
            )
            assert (
                version["tags"].items()
                >= {
                    "dcphub.checkpoint": "main:a/b/step-1",
                    "dcphub.step": "1",
                    "dcphub.metrics.val_loss": "0.25",
                    "dcphub.metrics.late": "0.5",
                    "dcphub.deleted": "false",
                    "dcphub.url": f"https://dcp.example.org/checkpoints/{first}",
                }.items()
            )
            done = handover(api, first, "mlflow")
            assert (done["state"], done["name"], done["version"]) == ("done", "main.a.b", "1")
            assert done["link"] == f"{mlflow.url}/#/models/main.a.b/versions/1"

            run = api.get(f"/checkpoints/{second}")["run_id"]
            body = {"checkpoint_id": second}
            api.post(f"/checkpoints/{second}/stage-requests", {"stage": "staging"})
            wait_until(lambda: handover(api, second, "mlflow")["state"] == "done", "a stage hands it over")
            assert mlflow.versions("main.a.b")[1]["tags"]["dcphub.aliases"] == "staging"
            assert http.put(f"{API}/runs/{run}/aliases/production", json=body).is_success
            assert http.put(f"{API}/runs/{run}/aliases/best", json=body).is_success
            for target in ("mlflow", "wandb"):
                is_done = partial(lambda to: handover(api, second, to)["state"] == "done", target)
                wait_until(is_done, f"{target} has it")
            assert [one["source"][-6:] for one in mlflow.versions("main.a.b")] == ["step-1", "step-2"]
            (log,) = wandb.rglob("run-*.wandb")
            assert b"s3://bucket/runs/a/b/step-2" in log.read_bytes()
            facts = [json.loads(one.read_text()) for one in (wandb / "artifacts").rglob("*") if one.is_file()]
            assert [one["key"] for one in facts] == ["a/b/step-2"]

            assert http.delete(f"{API}/checkpoints/{first}").is_success
            wait_until(lambda: handover(api, first, "mlflow")["is_marked_deleted"], "the deletion is marked")
            assert [one["tags"]["dcphub.deleted"] for one in mlflow.versions("main.a.b")[:1]] == ["true"]

            write_manifest(tmp_path / "main/a/b/step-2", save_id="0000beef")
            assert api.register("main", "a/b/step-2") == second
            api.finished(api.post(f"/checkpoints/{second}/handovers", {"target": "mlflow"})["id"])
            marks = [one["tags"].get("dcphub.replaced") for one in mlflow.versions("main.a.b")]
            assert marks == ["false", "true", None], "another save has its place"

            failed = api.post(f"/checkpoints/{local}/handovers", {"target": "mlflow"})["id"]
            wait_until(lambda: api.job(failed)["state"] == "failed", "a local path is refused")
            assert "features.handover.urls" in (detail := api.job(failed)["error"]["detail"]), detail
            assert str(tmp_path) not in detail
            pages = [
                http.get(f"/checkpoints/{one}", headers={"Accept": "text/html"}).text
                for one in (first, second, local)
            ]
        audit = [one["action"] for one in api.get("/audit")["items"]]
        assert audit.count("checkpoint.hand_over") >= 4 and "checkpoint.mark_deleted" in audit
        assert (
            "<bdi>main.a.b</bdi>" in pages[0] and "Version 1," in pages[0] and "marked as deleted" in pages[0]
        )
        assert "Hand over again" in pages[1] and "failed" in pages[2]
        texts = [
            waiting.text,
            *pages,
            service.log(),
            http.get(f"{API}/jobs").text,
            http.get(f"{API}/audit").text,
        ]
        assert not any(secret in text for text in texts for secret in (TOKEN, KEY))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Start a receiver in place of MLflow, for responses that MLflow rarely gives."""
    with Receiver() as made:
        yield made


@pytest.fixture
def handing(make_database: MakeDatabase, tmp_path: Path, receiver: Receiver) -> Iterator[Catalog]:
    """Start a catalog whose handovers go to the receiver and whose jobs run in this process."""
    mlflow = {"url": receiver.url.removesuffix("/hook"), "user": "u", "password": TOKEN}
    features = {"handover": {"allow_private": ["127.0.0.1"], "mlflow": mlflow}}
    with running_app(make_database(), tmp_path, features=features) as app:
        made = Catalog(app, tmp_path)
        roots = {name: root.model_dump() for name, root in app.service.settings.roots.items()}
        made.worker = KindRuns(app.service.database, tmp_path / "work", roots, features=features)
        yield made


def test_handovers_need_scope_target_and_checkpoint(handing: Catalog) -> None:
    """A handover needs the scope "write" for the root, a configured target and an existing checkpoint."""
    number = handing.add("run/step-1")
    path = f"/checkpoints/{number}/handovers"
    writer, reader = (handing.app.client(*scopes) for scopes in (("read", "write"), ("read",)))
    stranger = handing.app.client("read", "write", roots=["other"])
    body = {"target": "mlflow"}
    assert [handing.status("POST", path, one, json=body) for one in (reader, stranger)] == [403, 404]
    assert handing.status("GET", path, stranger) == 404
    assert handing.get(path, reader)["items"][0]["state"] == "none"
    for wrong, status in (
        ({"target": "wandb"}, 404),
        ({"target": "x"}, 422),
        ({}, 422),
        (body | {"a": 1}, 422),
    ):
        assert handing.status("POST", path, json=wrong) == status, wrong
    first, again = (writer.post(f"{API}{path}", json=body) for _ in range(2))
    assert (first.status_code, first.json()["id"]) == (202, again.json()["id"])
    page = writer.get(f"/checkpoints/{number}", headers={"Accept": "text/html"}).text
    assert 'id="handovers"' in page and handing.get(path)["items"][0]["state"] == "waiting"
    gone = handing.add("run/step-2")
    handing.http.delete(f"{API}/checkpoints/{gone}")
    assert handing.status("POST", f"/checkpoints/{gone}/handovers", json=body) == 409


@pytest.mark.parametrize(
    ("answer", "state", "detail"),
    [
        (401, "failed", "check the credentials"),
        ((302, {"Location": "http://169.254.169.254/"}), "failed", "answered 302"),
        (503, "queued", "answered 503"),
        (204, "failed", "has no model version"),
    ],
)
def test_errors_and_redirects_of_a_target(
    handing: Catalog, receiver: Receiver, answer: Any, state: str, detail: str
) -> None:
    """A refused request fails the job, a temporary error is retried, and redirects are not followed."""
    number = handing.add("run/step-1")
    receiver.answers.append(answer)
    job = handing.http.post(f"{API}/checkpoints/{number}/handovers", json={"target": "mlflow"}).json()["id"]
    for _ in range(2 if state == "queued" else 4):
        if (made := handing.worker.claim()) is not None:
            handing.worker.complete(made, handing.worker.carry_out(made))
    shown = handing.get(f"/jobs/{job}")
    assert detail in (shown["error"] or shown["waiting"])["detail"]
    assert (shown["error"] is None) == (state == "queued")
    assert TOKEN not in json.dumps(shown)
    assert {one.path.partition("?")[0] for one in receiver.requests} <= {
        f"/api/2.0/mlflow/{path}"
        for path in ("model-versions/search", "registered-models/create", "model-versions/create")
    }


@pytest.mark.parametrize(
    ("given", "detail"),
    [
        ({"mlflow": {"url": "http://10.0.0.7:5000"}}, "features.handover.allow_private"),
        ({"mlflow": {"url": "ftp://mlflow.example.org"}}, "http(s)://"),
        ({"mlflow": {"url": "https://m.example.org", "user": "u"}}, "set token, or user and password"),
        ({"mlflow": {"url": "https://m.example.org", "name": "{step}"}}, "{root} and {run}"),
        ({"wandb": {"project": "p"}}, "set api_key, or folder"),
        ({"mlflow": {"url": "https://m.example.org", "token": {"a": TOKEN}}}, "valid string"),
        ({"mlflow": {"url": "https://m.example.org", "token": f"{TOKEN}\n"}}, "visible ASCII"),
        ({"when": [{"event": "checkpoint.aliased "}]}, "kinds are checkpoint.aliased, checkpoint.committed"),
        ({"when": [{"targets": ["wandb"]}]}, "features.handover.wandb is not configured"),
    ],
)
def test_invalid_settings_stop_the_start(tmp_path: Path, given: Any, detail: str) -> None:
    """Invalid settings stop the start; the message has the setting and the remedy, and no secret."""
    with (
        pytest.raises(Exception, match=r"settings features\.handover") as caught,
        running_app(f"sqlite:///{tmp_path}/db", tmp_path, features={"handover": given}),
    ):
        pass
    assert detail in str(caught.value) and TOKEN not in str(caught.value)

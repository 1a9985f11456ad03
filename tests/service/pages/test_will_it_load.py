"""Load check: the page and the API compare a checkpoint with a given state."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dcp
from tests.support.app import App
from tests.support.catalog import Catalog
from tests.support.page_rows import scan
from tests.support.pages import Browser, PageText, faults_of

HOSTILE = "\"><script>alert(1)</script>'\u202e"
TIMES = "\N{MULTIPLICATION SIGN}"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 24,
    "dtype": "float32",
    "auto_map": {"AutoModelForCausalLM": "somebody/elses--code.Model"},
}


def model() -> torch.nn.Module:
    """Return a model of two layers."""
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint with the model below a key, and one with the bare state."""
    folder = tmp_path_factory.mktemp("saved")
    dcp.save({"model": model(), "step": 1}, checkpoint_id=folder / "run/step-1", no_dist=True)
    bare = {**model().state_dict(), HOSTILE: torch.ones(2)}
    dcp.save(bare, checkpoint_id=folder / "bare/step-1", no_dist=True)
    return folder


@pytest.fixture
def site(saved: Path, app: App, tmp_path: Path) -> App:
    """Start the application without keys over both checkpoints."""
    shutil.copytree(saved, tmp_path / "main", dirs_exist_ok=True)
    scan(app)
    return app


def number(app: App, key: str) -> int:
    """Return the id of a checkpoint."""
    return int(app.base.get("/api/v1/checkpoints/lookup", params={"root": "main", "key": key}).json()["id"])


def pasted(app: App, key: str, text: str, status: int = 200) -> PageText:
    """Submit a pasted state, and return the resulting page."""
    path = f"/checkpoints/{number(app, key)}/will-it-load"
    browser = Browser(app.client())
    (form,) = [form for form in browser.page(path).forms if form.action == path and form.method == "post"]
    answer = browser.submit(form, text=text)
    assert answer.status_code == status, answer.text[:2000]
    page = PageText(answer.text)
    assert faults_of(page) == []
    return page


def shapes(**changes: Any) -> dict[str, Any]:
    """Return the shapes of the model, as users print them."""
    state = {n: {"dtype": str(t.dtype), "shape": list(t.shape)} for n, t in model().state_dict().items()}
    return {name: one for name, one in {**state, **changes}.items() if one is not None}


def test_states_with_other_names_get_a_rename(site: App, tmp_path: Path) -> None:
    """A state with other names gets a rename, and code that loads the checkpoint."""
    page = pasted(site, "run/step-1", json.dumps(shapes()))
    assert "Yes, with a rename." in page.text and "4 of 4 names match" in page.text
    code = page.text.partition("In Python")[2].partition("Choose a state")[0]
    assert "rename={'^': 'model.'}" in code
    place = number(site, "run/step-1")
    body = {"tensors": [{"fqn": name, "shape": one["shape"]} for name, one in shapes().items()]}
    answer = site.base.post(f"/api/v1/checkpoints/{place}/will-it-load", json=body).json()
    assert (answer["answer"], answer["rename"]) == ("rename", {"^": "model."})
    assert answer["plain"]["counts"]["missing"] == 4 and answer["renamed"]["counts"]["missing"] == 0
    target = model()
    exec(answer["code"], {"model": target})
    stored = dcp.read(tmp_path / "main/run/step-1")["model"]
    assert torch.equal(target.state_dict()["0.weight"], stored["0.weight"])


def test_through_a_weight_map(site: App, tmp_path: Path) -> None:
    """A weight map is applied first: missing names are listed, and the code loads."""
    name = "model.layers.0.mlp.experts.{}.gate_proj.weight"
    experts = {name.format(n): torch.full((3, 2), n + 1.0) for n in (0, 1)}
    stored = {"model": {"model.norm.weight": torch.ones(4), **experts}, "step": 1}
    dcp.save(stored, checkpoint_id=tmp_path / "main/hf/step-1", no_dist=True)
    dcp.save({name.format(1): torch.ones(3, 2)}, checkpoint_id=tmp_path / "main/hf/step-2", no_dist=True)
    for step in ("step-1", "step-2"):
        (tmp_path / "main/hf" / step / "config.json").write_text('{"num_experts": 2}')
    scan(site)
    stacked = "layers.0.moe.routed_experts.inner_experts.w1_EFD"
    state = {"norm.weight": [4], stacked: [2, 3, 2], "lm_head.weight": [5, 4]}
    path = f"/checkpoints/{number(site, 'hf/step-1')}/will-it-load"
    browser = Browser(site.client())
    (form,) = [form for form in browser.page(path).forms if form.action == path and form.method == "post"]
    chosen = {"map": "qwen3:hf-to-titan", "below": "model"}
    page = PageText(browser.submit(form, text=json.dumps(state), **chosen).text)
    assert faults_of(page) == []
    assert "2 of 3 names match through the map qwen3:hf-to-titan" in page.text
    assert "lm_head.weight" in page.text.partition("Missing 1")[2]
    del state["lm_head.weight"]
    body = {"tensors": [{"fqn": name, "shape": shape} for name, shape in state.items()]}
    answer = site.base.post(f"/api/v1{path}", params=chosen, json=body).json()
    assert answer["answer"] == "yes"
    assert "map=dcp.weight_map('qwen3:hf-to-titan', below='model')" in answer["code"]
    found = {name: torch.zeros(shape) for name, shape in state.items()}
    exec(answer["code"], {"model": SimpleNamespace(state_dict=lambda: found, load_state_dict=dict)})
    assert torch.equal(found[stacked], torch.stack([*experts.values()]))
    for wrong, detail in (
        ({"map": "qwen3:hf-to-titn"}, "is not a ready map"),
        ({"below": "model"}, "require a map"),
        ({"map": "x" * 300}, "256 characters"),
        ({**chosen, "below": "x" * 1025}, "1024 characters"),
    ):
        problem = site.base.post(f"/api/v1{path}", params=wrong, json=body)
        assert (problem.status_code, detail in problem.json()["detail"]) == (422, True), problem.text
        refused = browser.submit(form, text=json.dumps(state), **wrong)
        assert refused.status_code == 422
    at = site.base.get(f"/api/v1{path}", params={"state_of": path.split("/")[2], **chosen}).json()
    assert {one["fqn"] for one in at["plain"]["problems"] if one["kind"] == "missing"} == {
        "model.model.norm.weight",
        *(f"model.{one}" for one in experts),
    }
    other = number(site, "hf/step-2")
    problem = site.base.get(f"/api/v1/checkpoints/{other}/will-it-load?state_of=1&map=qwen3:hf-to-titan")
    assert problem.status_code == 422 and "expert 0 is missing" in problem.json()["detail"]
    refused = browser.get(f"/checkpoints/{other}/will-it-load?state_of=1&map=qwen3:hf-to-titan")
    assert refused.status_code == 422 and "expert 0 is missing" in PageText(refused.text).text
    assert browser.get(f"{path}?state_of=1&map=&below=").status_code == 200
    (tmp_path / "main/hf/step-1/config.json").write_text("{")
    problem = site.base.get(f"/api/v1{path}?state_of=1&map=qwen3:hf-to-titan")
    assert problem.status_code == 422 and "config.json of main:hf/step-1" in problem.json()["detail"]
    assert str(tmp_path) not in problem.text


def test_all_mismatches_are_listed(site: App) -> None:
    """Missing and unexpected names, and other shapes and dtypes, are listed with both sides."""
    given = shapes(
        **{
            "0.weight": {"dtype": "bfloat16", "shape": [3, 4]},
            "0.bias": {"dtype": "float32", "shape": [9]},
            "1.bias": None,
            f"new.{HOSTILE}": [5],
        }
    )
    page = pasted(site, "bare/step-1", json.dumps(given))
    assert "No." in page.text and "1 of 4 names match" in page.text
    for kind, name, facts in (
        ("Missing 1", f"new.{HOSTILE}".replace("\u202e", "\\u202e"), ""),
        ("Different shape 1", "0.bias", "float32 9 float32 3"),
        ("Different dtype 1", "0.weight", f"bfloat16 3 {TIMES} 4 float32 3 {TIMES} 4"),
        ("Unexpected 2", "1.bias", "float32 2"),
    ):
        section = page.text.partition(kind)[2]
        assert name in section and facts in section, kind
    cast = pasted(site, "bare/step-1", json.dumps(shapes(**{"0.weight": {"dtype": "F16", "shape": [3, 4]}})))
    assert "Yes, with a cast." in cast.text and 'dtype="cast"' in cast.text
    assert "Yes, as it is." in pasted(site, "bare/step-1", json.dumps(shapes())).text


def test_another_checkpoint(site: App) -> None:
    """Another checkpoint is chosen by its id in the URL, with JSON."""
    one, two = number(site, "bare/step-1"), number(site, "run/step-1")
    browser = Browser(site.client())
    path = f"/checkpoints/{two}/will-it-load"
    assert path in browser.page(f"/checkpoints/{two}").links
    assert any(
        given.get("value") == str(one) for name, given in browser.page(path).elements if name == "option"
    )
    page = browser.page(f"{path}?state_of={one}")
    assert "No." in page.text and "It finds 4 of 5 missing names." in page.text
    (twin,) = [given["href"] for _, given in page.elements if given.get("class") == "twin"]
    answer = site.base.get(twin).json()
    assert answer["renamed"]["counts"]["missing"] == 1 and answer["wanted"] == 5
    assert "Yes, as it is." in browser.page(f"{path}?state_of={two}").text
    assert browser.get(f"{path}?state_of=99").status_code == 404
    assert browser.get(f"{path}?shapes_job=99").status_code == 404
    assert site.base.get(f"/api/v1{path}").status_code == 422


HOSTILE_TEXTS = [
    *("", "nonsense", "[]", "{}", '{"a": NaN}', '{"a": [1], "a": [1]}', '{"a": [-1]}', '{"a": [1.5]}'),
    *('{"a": [true]}', '{"a": {"dtype": "float33", "shape": []}}', '{"tensors": [1]}', '{"weight_map": {}}'),
    *('{"tensors": [{"fqn": 7}]}', "[" * 100_000, '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    *('{"a": [' + "1" * 5000 + "]}", json.dumps({"a": [1] * 1000}), json.dumps({"x" * 5000: [1]})),
    *('{"\\ud800": [1]}', f'{{"a": "{"</textarea><script>alert(1)</script>"}"}}'),
]


def test_hostile_text_is_refused(site: App) -> None:
    """Invalid text gets 422 and is shown as text."""
    for text in HOSTILE_TEXTS:
        page = pasted(site, "run/step-1", text, status=422)
        assert page.text and not [
            1 for name, given in page.elements if name == "script" and "src" not in given
        ]


def test_accepted_forms_of_a_state(site: App) -> None:
    """Output of dcp show --json, safetensors headers and indexes, and plain shapes are accepted."""
    shown = [{"fqn": name, **one} for name, one in shapes().items()]
    short = {"torch.float32": "F32", "float32": "F32"}
    header = {name: {"dtype": short[one["dtype"]], "shape": one["shape"]} for name, one in shapes().items()}
    for document in (shapes(), {"checkpoint": {}, "tensors": shown}, header):
        assert "Yes, as it is." in pasted(site, "bare/step-1", json.dumps(document)).text
    index = {"metadata": {}, "weight_map": dict.fromkeys(shapes(), "1.safetensors")}
    assert "4 of 4 names match" in pasted(site, "bare/step-1", json.dumps(index)).text


# -- models of Hugging Face ----------------------------------------------------------------------------------


def test_a_pasted_config_becomes_a_job(site: App) -> None:
    """A pasted config becomes a job that the page follows; results before its end get 409."""
    two = number(site, "run/step-1")
    page = pasted(site, "run/step-1", json.dumps(CONFIG))
    assert any("/api/v1/jobs/1/events" in given.get("sse-connect", "") for _, given in page.elements)
    assert site.base.get("/api/v1/jobs/1").json()["params"]["config"] == CONFIG
    assert site.base.get(f"/api/v1/checkpoints/{two}/will-it-load?shapes_job=1").status_code == 409
    large = {**CONFIG, "id2label": {str(n): "x" * 50 for n in range(2000)}}
    assert "65,536 characters at most" in pasted(site, "run/step-1", json.dumps(large), status=422).text


def _made(**changes: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "dcp.integrations.model_shapes"],
        input=json.dumps({**CONFIG, **changes}),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.exhaustive
def test_models_are_built_without_weights_and_foreign_code(tmp_path: Path) -> None:
    """Known models are built as in transformers; configs that need code or too much memory are refused."""
    from transformers import LlamaConfig, LlamaForCausalLM

    expected = LlamaForCausalLM(
        LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "auto_map"})
    ).state_dict()
    found = _made()
    assert {one["fqn"]: tuple(one["shape"]) for one in found["tensors"]} == {
        name: tuple(one.shape) for name, one in expected.items()
    }
    assert found["architecture"] == "LlamaForCausalLM"
    assert _made(hidden_size=1 << 14, vocab_size=1 << 20)["tensors"][0]["shape"] == [1 << 20, 1 << 14]
    composite = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {**CONFIG, "attn_implementation": "somebody/kernels"},
        "vision_config": {
            "model_type": "clip_vision_model",
            "_attn_implementation": "somebody/kernels",
            **{name: CONFIG[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")},
            "num_hidden_layers": 1,
            "image_size": 8,
            "patch_size": 4,
        },
    }
    assert any("vision" in one["fqn"] for one in _made(**composite)["tensors"])
    for name in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        assert _made(**{name: "somebody/kernels"}) == found, name
    for changes, detail in (
        ({"model_type": "somebodys"}, "no model_type"),
        ({"num_hidden_layers": 10**6}, "more than 200,000 modules"),
        ({"hidden_size": "x"}, "cannot create the model"),
        ({"num_attention_heads": 0}, "cannot create the model"),
    ):
        assert detail in _made(**changes)["problem"], changes


@pytest.mark.exhaustive
def test_a_model_of_a_config_from_end_to_end(site: App, tmp_path: Path) -> None:
    """A job runs the real program on a config, and the page shows its result."""
    pasted(site, "run/step-1", json.dumps({**CONFIG, "hidden_size": "nonsense"}))
    pasted(site, "run/step-1", json.dumps(CONFIG))
    Catalog(site, tmp_path).work()
    one, two = (site.base.get(f"/api/v1/jobs/{n}").json() for n in (1, 2))
    assert (one["state"], two["state"]) == ("failed", "succeeded")
    assert "cannot create the model" in one["error"]["detail"]
    assert two["result"]["tensor_count"] == 12
    browser = Browser(site.client())
    path = f"/checkpoints/{number(site, 'run/step-1')}/will-it-load"
    assert "No." in browser.page(f"{path}?shapes_job=2").text
    assert "cannot create the model" in browser.page(f"{path}?shapes_job=1").text

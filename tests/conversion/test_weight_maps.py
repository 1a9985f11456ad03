"""Conversions through a weight map: streamed, exact, and back."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dcp
from dcp.errors import CorruptCheckpointError, PlanError
from tests.support.conversion import command, flip

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with the names and the configuration that transformers writes; test_ready_maps has its
    own."""
    folder = tmp_path_factory.mktemp("llama")
    shapes = {"model.embed_tokens": (37, 48), "model.norm": (48,), "lm_head": (37, 48)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.self_attn.{name}_proj": (32, 48) for name in "kv"}
        shapes |= {f"{layer}.self_attn.q_proj": (64, 48), f"{layer}.self_attn.o_proj": (48, 64)}
        shapes |= {f"{layer}.mlp.{name}_proj": (80, 48) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (48, 80)}
        shapes |= {f"{layer}.{name}_layernorm": (48,) for name in ("input", "post_attention")}
    torch.manual_seed(0)
    state = {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "llama", "hidden_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80, "vocab_size": 37}
    config |= {"tie_word_embeddings": False, "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_folder(folder: Path) -> State:
    """The tensors of a folder of safetensors files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def equal(one: State, other: State) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


_SPLIT = {"to": "dcp", "files": 3, "chunks": "split"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama:hf-to-titan", {"to": "dcp"}),
        ("llama:hf-to-megatron", _SPLIT),
        pytest.param("llama:hf-to-titan", _SPLIT, marks=pytest.mark.exhaustive),
        pytest.param("llama:hf-to-megatron", {"to": "dcp"}, marks=pytest.mark.exhaustive),
    ],
)
def test_there_and_back(model: Path, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Through our own format in one chunk a tensor and in several, and back to what transformers loads."""
    dcp.convert(model, tmp_path / "mapped", map=name, **options)
    weights = dcp.weight_map(name, model, inverse=True)
    dcp.convert(tmp_path / "mapped", tmp_path / "back", to="safetensors", map=weights)
    assert equal(of_folder(model), of_folder(tmp_path / "back"))


def test_rotary_halves_become_pairs(model: Path, tmp_path: Path) -> None:
    """As Meta's own conversion permutes them, in a file that torch.load reads."""
    dcp.convert(model, tmp_path / "titan.pt", to="torch", map="llama:hf-to-titan", dtype="float32")
    made = torch.load(tmp_path / "titan.pt", weights_only=True)
    query = of_folder(model)["model.layers.1.self_attn.q_proj.weight"]
    wanted = query.view(4, 2, 8, 48).transpose(1, 2).reshape(64, 48).float()
    assert torch.equal(made["layers.1.attention.qkv_linear.wq.weight"], wanted)


def test_megatron_has_queries_keys_and_values_by_group(model: Path, tmp_path: Path) -> None:
    """Of each group all heads of its queries, then its key and its value; biases as weights."""
    state = {name: tensor for name, tensor in of_folder(model).items() if "self_attn" not in name}
    kinds = {"q": (4, 16), "k": (2, 16), "v": (2, 16)}
    for kind, (heads, size) in kinds.items():
        for layer in range(2):
            name = f"model.layers.{layer}.self_attn.{kind}_proj"
            state |= {
                f"{name}.weight": torch.randn(heads * size, 48),
                f"{name}.bias": torch.randn(heads * size),
            }
    save_file(state, tmp_path / "model.safetensors")
    shutil.copy(model / "config.json", tmp_path)
    dcp.convert(tmp_path / "model.safetensors", tmp_path / "made", to="dcp", map="llama:hf-to-megatron")
    made = dcp.read(tmp_path / "made")
    for part, rest in (("weight", [48]), ("bias", [])):
        names = [f"model.layers.1.self_attn.{kind}_proj.{part}" for kind in kinds]
        fused = torch.cat([state[name].view(2, -1, 16, *rest) for name in names], dim=1).flatten(0, 2)
        assert torch.equal(made[f"decoder.layers.1.self_attention.linear_qkv.{part}"], fused), part


def test_what_is_sharded_is_fused_and_padded(tmp_path: Path) -> None:
    """Of chunks that do not end where heads do; what is added is zeros."""
    state = {name: torch.arange(70.0).view(10, 7) + 100 * at for at, name in enumerate("qkv")}
    save_file(state, tmp_path / "in.safetensors")
    dcp.convert(tmp_path / "in.safetensors", tmp_path / "in", to="dcp", files=3, chunks="split")
    fused = {
        "rules": [
            {
                "from": {"q": "(two q) width", "k": "(two k) width", "v": "(two v) width"},
                "to": {"qkv": "width (two (q + k + v) + pad)"},
                "padding": ["pad"],
            }
        ],
        "sizes": {"two": 2, "pad": 5, "q": 5, "k": 5, "v": 5},
    }
    dcp.convert(tmp_path / "in", tmp_path / "out.safetensors", to="safetensors", map=fused)
    (made,) = load_file(tmp_path / "out.safetensors").values()
    parts = [state[name].view(2, 5, 7) for name in "qkv"]
    wanted = torch.cat(parts, dim=1).reshape(30, 7).T
    assert torch.equal(made, torch.cat([wanted, torch.zeros(7, 5)], dim=1))
    dcp.convert(
        tmp_path / "out.safetensors",
        tmp_path / "back.pt",
        to="torch",
        map=dcp.weight_map(fused, inverse=True),
    )
    assert equal(torch.load(tmp_path / "back.pt", weights_only=True), state)


def test_a_damaged_source_is_noticed(model: Path, tmp_path: Path) -> None:
    """Though what is read is permuted."""
    dcp.convert(model, tmp_path / "dcp", to="dcp")
    flip(tmp_path / "dcp")
    weights = dcp.weight_map("llama:hf-to-titan", model)
    with pytest.raises(CorruptCheckpointError):
        dcp.convert(tmp_path / "dcp", tmp_path / "out", to="safetensors", map=weights)
    assert not (tmp_path / "out").exists()


def test_what_has_several_elements_in_a_byte_is_only_renamed(tmp_path: Path) -> None:
    """Transposed, the elements of each byte would stay neighbours, without a word."""
    packed = torch.arange(12, dtype=torch.uint8).view(3, 4).view(torch.float4_e2m1fn_x2)
    dcp.save({"w": packed}, checkpoint_id=tmp_path / "in", no_dist=True)
    turned = {"rules": [{"from": {"w": "out in_"}, "to": {"v": "in_ out"}}]}
    with pytest.raises(PlanError, match="'v': several elements are one byte"):
        dcp.convert(tmp_path / "in", tmp_path / "out", to="dcp", map=turned)
    dcp.convert(tmp_path / "in", tmp_path / "out", to="dcp", map={"rules": [{"from": "w", "to": "v"}]})
    assert torch.equal(dcp.read(tmp_path / "out")["v"].view(torch.uint8), packed.view(torch.uint8))


def test_names_that_no_rule_knows_are_told_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    """All of them; what is chosen is chosen first."""
    weights = {"rules": [{"from": "lm_head.weight", "to": "head"}]}
    with pytest.raises(PlanError, match=r"no rule knows 'model\.embed_tokens\.weight'"):
        dcp.convert(model, tmp_path / "out", to="dcp", map=weights)
    assert not (tmp_path / "out").exists()
    dcp.convert(model, tmp_path / "out", to="dcp", map=weights, only="lm_head.*")
    assert list(dcp.read(tmp_path / "out")) == ["head"]


def test_sizes_that_nobody_said_are_asked_for(model: Path, tmp_path: Path) -> None:
    """A sharded checkpoint has no configuration beside it."""
    dcp.convert(model, tmp_path / "dcp", to="dcp")
    with pytest.raises(PlanError, match=r"sizes of heads and half .* config\.json, or the sizes themselves"):
        dcp.convert(tmp_path / "dcp", tmp_path / "out", to="torch", map="llama:hf-to-titan")
    weights = dcp.weight_map("llama:hf-to-titan", num_attention_heads=4, num_key_value_heads=2)
    dcp.convert(tmp_path / "dcp", tmp_path / "out.pt", to="torch", map=weights)


def test_the_command_line(model: Path, tmp_path: Path) -> None:
    """Maps are listed, checked and used there, and back."""
    assert "llama:hf-to-titan" in command("map", "ls").out
    checked = command("map", "check", "llama:hf-to-titan", model)
    assert checked.status == 0
    assert "layers.1.attention.qkv_linear.wq.weight" in checked.out
    wrong = command("map", "check", "llama:hf-to-titan", model, "--inverse")
    assert wrong.status == 1
    assert "no rule knows" in wrong.out and "is it the wrong way round (inverse)?" in wrong.out
    first = command("map", "check", "llama:hf-to-titan", model, "--top", "3")
    assert re.search(r"^and \d+ more tensors$", first.out, re.MULTILINE)
    there = command("convert", model, tmp_path / "titan", "--to", "dcp", "--map", "llama:hf-to-titan")
    assert there.status == 0, there.err
    assert dcp.open_index(tmp_path / "titan").provenance["map"] == "llama:hf-to-titan"
    options = ["--map", "llama:hf-to-titan", "--inverse", "--config", model, "--set", "two=2"]
    back = command("convert", tmp_path / "titan", tmp_path / "back", "--to", "safetensors", *options)
    assert back.status == 0, back.err
    assert equal(of_folder(model), of_folder(tmp_path / "back"))


def test_whether_it_would_load(model: Path, tmp_path: Path) -> None:
    """Beside a checkpoint of the other definition: what is missing, left over, or of another shape."""
    dcp.convert(model, tmp_path / "titan", to="dcp", map="llama:hf-to-titan")
    fine = command("map", "check", "llama:hf-to-titan", model, "--into", tmp_path / "titan")
    assert fine.status == 0, fine.err
    state = dcp.read(tmp_path / "titan")
    state["norm.weight"] = torch.ones(3)
    state["more.weight"] = state.pop("lm_head.weight")
    dcp.save(state, checkpoint_id=tmp_path / "other", no_dist=True)
    told = command("map", "check", "llama:hf-to-titan", model, "--into", tmp_path / "other", "--json")
    assert told.status == 1, told.err
    found = {(one["kind"], one["fqn"]) for one in told.json}
    assert found == {
        ("missing", "more.weight"),
        ("unexpected", "lm_head.weight"),
        ("shape", "norm.weight"),
    }
    table = command("map", "check", "llama:hf-to-titan", model, "--into", tmp_path / "other").out
    assert f"{len(state) - 2} of {len(state)} tensors fit" in table
    dcp.convert(tmp_path / "titan", tmp_path / "half", to="dcp", dtype={"norm.weight": "float16"})
    half = command("map", "check", "llama:hf-to-titan", model, "--into", tmp_path / "half")
    assert half.status == 1, half.err  # as dcp.load, unless it is told to cast


def test_a_model_below_a_key_of_a_training_state(model: Path, tmp_path: Path) -> None:
    """As a manager saves it, with an optimizer beside it; the error without it says what to do."""
    titan, steps, back = tmp_path / "titan", tmp_path / "step", tmp_path / "back"
    dcp.convert(model, titan, to="dcp", map="llama:hf-to-titan")
    dcp.save({"model": dcp.read(titan), "optimizer": {"step": torch.zeros(2)}}, checkpoint_id=steps)
    told = ["convert", steps, back, "--to", "safetensors", "--map", "llama:hf-to-titan", "--inverse"]
    wrong = command(*told, "--hf", model)
    assert "what is below 'model': say so (below)" in wrong.err
    assert not back.exists()
    done = command(*told, "--hf", model, "--below", "model", "--only", "model")
    assert done.status == 0, done.err
    assert equal(of_folder(model), of_folder(back))
    into_it = dcp.weight_map("llama:hf-to-titan", model, inverse=True, below="model").inverse
    dcp.convert(back, tmp_path / "again", to="dcp", map=into_it)
    named = {f"model.{name}": tensor for name, tensor in dcp.read(titan).items()}
    assert equal(dcp.read(tmp_path / "again"), named)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "bool", "complex128", "uint16"])
def test_tensors_that_share_memory_or_have_no_elements(tmp_path: Path, kind: str) -> None:
    """Views of one storage, an expanded one, one of no elements, one of no dimensions; of unusual types."""
    whole = (torch.arange(24) % 2).to(getattr(torch, kind)).view(4, 6)
    states = {"x": whole, "t": whole.T, "e": whole[:1].expand(4, 6), "n": whole[:0], "s": whole[1, 1]}
    torch.save(states, tmp_path / "in.pt")
    rules: list[dict[str, Any]] = [{"from": {name: "a b"}, "to": {f"{name}2": "b a"}} for name in "xten"]
    rules.append({"from": {"s": ""}, "to": {"s2": ""}})
    dcp.convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", map={"rules": rules})
    made = dcp.read(tmp_path / "out")
    for name, tensor in states.items():
        assert made[f"{name}2"].shape == tensor.t().shape
        found, wanted = (one.reshape(-1).view(torch.uint8) for one in (made[f"{name}2"], tensor.t()))
        assert torch.equal(found, wanted)


def test_entries_that_nobody_runs_can_be_left_out(tmp_path: Path) -> None:
    """With a map as without."""
    torch.save({"x": torch.ones(2), "bad": subprocess.Popen}, tmp_path / "in.pt")
    weights = {"rules": [{"from": "x", "to": "y"}]}
    with pytest.raises(PlanError, match="bad"):
        dcp.convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", map=weights)
    dcp.convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", map=weights, exclude="bad")
    assert list(dcp.read(tmp_path / "out")) == ["y"]


def test_another_map_does_not_go_on_with_what_a_stopped_run_wrote(tmp_path: Path) -> None:
    """Of the same names and sizes."""
    whole = torch.arange(36.0).view(6, 6)
    save_file({"x": whole}, tmp_path / "in.safetensors")

    def converted(axes: str, progress: Any = None) -> None:
        rules = {"rules": [{"from": {"x": "a b"}, "to": {"x": axes}}]}
        target = tmp_path / "out"
        dcp.convert(tmp_path / "in.safetensors", target, to="dcp", map=rules, progress=progress)

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converted("a b", stop)
    converted("b a")
    assert torch.equal(dcp.read(tmp_path / "out")["x"], whole.T)


def test_values_keep_their_places(tmp_path: Path) -> None:
    """In dicts and lists, with keys that are no strings; a tensor is what its new name says."""
    state = {"x": torch.ones(2), "run": {"steps": [1, {"lr": 0.5}], 7: "seven"}, "shape": torch.Size([2])}
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    dcp.convert(tmp_path / "in", tmp_path / "out", to="dcp", map={"rules": [{"from": "x", "to": "a.y"}]})
    found = dcp.read(tmp_path / "out")
    assert torch.equal(found.pop("a.y"), torch.ones(2))
    assert found == {"run": state["run"], "shape": state["shape"]}


def test_sizes_and_layers_that_cannot_be_meant(model: Path, tmp_path: Path) -> None:
    """On the command line: a name that the map has not, and a model without its last layer."""
    options = ["--to", "dcp", "--map", "llama:hf-to-titan", "--set", "hedas=4"]
    wrong = command("convert", model, tmp_path / "out", *options)
    assert wrong.status != 0
    assert "no size 'hedas'; did you mean heads" in wrong.err
    save_file(
        {n: t for n, t in of_folder(model).items() if ".layers.1." not in n}, tmp_path / "m.safetensors"
    )
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(PlanError, match="there should be 2 of layer"):
        dcp.convert(tmp_path / "m.safetensors", tmp_path / "out", to="dcp", map="llama:hf-to-titan")
    assert not (tmp_path / "out").exists()

"""`dcp.load` through a weight map, into parameters that are fused, split or permuted."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcp
from dcp.errors import (
    DtypeMismatchError,
    MissingKeyError,
    OptionError,
    PlanError,
    ShapeMismatchError,
    UnexpectedKeyError,
)
from dcp.storage.stores import PosixStore
from tests.save_load.code_paths import TakesObjects, error_of
from tests.support.examples import examples
from tests.support.ranks import run_ranks
from tests.support.recording import RecordingStore
from tests.support.sharded import grid, save_sharded

GROUPS, QUERIES, HEAD, WIDTH = 4, 3, 6, 16

FUSED: dict[str, Any] = {
    "rules": [
        {
            "from": {
                "{layer}.q.weight": "(groups queries two half) width",
                "{layer}.k.weight": "(groups key two half) width",
                "{layer}.v.weight": "(groups value head) width",
            },
            "to": {
                "{layer}.qk.weight": "(groups (queries + key) half two) width",
                "{layer}.v.weight": "(groups value head) width",
            },
        },
        {
            "from": {"{layer}.gate": "hidden width", "{layer}.up": "hidden2 width"},
            "to": {"{layer}.gate_up": "(hidden + hidden2) width"},
        },
        {"from": {"{layer}.down.weight": "width hidden"}, "to": {"{layer}.down.weight": "hidden width"}},
        {
            "from": {"emb.weight": "vocab width"},
            "to": {"emb.weight": "(vocab + pad) width"},
            "padding": ["pad"],
        },
        {"from": {"experts.{expert}": "out width"}, "to": {"experts": "expert width out"}},
        {"from": "norm.{rest:*}", "to": "final.{rest:*}"},
    ],
    "sizes": {
        "groups": GROUPS,
        "queries": QUERIES,
        "key": 1,
        "value": 1,
        "two": 2,
        "half": HEAD // 2,
        "head": HEAD,
        "pad": 3,
    },
}


def numbered(*shape: int, first: int = 0) -> torch.Tensor:
    """Return a tensor of distinct elements, none of them 0."""
    return torch.arange(first + 1, first + math.prod(shape) + 1, dtype=torch.float32).view(shape)


def separate() -> dict[str, torch.Tensor]:
    """Return a model with separate parts."""
    state = {
        "0.q.weight": numbered(GROUPS * QUERIES * HEAD, WIDTH),
        "0.k.weight": numbered(GROUPS * HEAD, WIDTH, first=10_000),
        "0.v.weight": numbered(GROUPS * HEAD, WIDTH, first=20_000),
        "0.gate": numbered(24, WIDTH, first=30_000),
        "0.up": numbered(24, WIDTH, first=40_000),
        "0.down.weight": numbered(WIDTH, 24, first=50_000),
        "emb.weight": numbered(13, WIDTH, first=60_000),
        "norm.weight": numbered(WIDTH, first=70_000),
    }
    return state | {f"experts.{at}": numbered(8, WIDTH, first=1000 * at + 80_000) for at in range(5)}


def fused() -> dict[str, torch.Tensor]:
    """Return the same model with fused parts, made in memory."""
    own = separate()
    queries, keys = (own[f"0.{name}.weight"].view(GROUPS, -1, 2, HEAD // 2, WIDTH) for name in "qk")
    both = torch.cat([queries, keys], dim=1).transpose(2, 3)
    return {
        "0.qk.weight": both.reshape(-1, WIDTH),
        "0.v.weight": own["0.v.weight"],
        "0.gate_up": torch.cat([own["0.gate"], own["0.up"]]),
        "0.down.weight": own["0.down.weight"].T.contiguous(),
        "emb.weight": torch.cat([own["emb.weight"], torch.zeros(3, WIDTH)]),
        "experts": torch.stack([own[f"experts.{at}"].T for at in range(5)]),
        "final.weight": own["norm.weight"],
    }


def like(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state of the same names and shapes with other values."""
    return {name: torch.full_like(tensor, -1.0) for name, tensor in state.items()}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Check that all tensors are equal bit for bit."""
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a checkpoint of the separate parts."""
    dcp.save(separate(), checkpoint_id=tmp_path / "separate", no_dist=True)
    return tmp_path / "separate"


def test_a_mapped_load_equals_conversion_then_load(saved: Path, tmp_path: Path) -> None:
    """A mapped load equals a conversion and a load: parts are fused, permuted, padded, stacked, and back."""
    state = like(fused())
    report = dcp.load(state, checkpoint_id=saved, map=FUSED, no_dist=True)
    assert_equal(state, fused())
    assert report.bytes_needed == sum(tensor.nbytes for tensor in separate().values())
    assert report.unexpected == []
    dcp.convert(saved, tmp_path / "converted", to="dcp", map=FUSED)
    converted = like(fused())
    dcp.load(converted, checkpoint_id=tmp_path / "converted", no_dist=True)
    assert_equal(converted, state)
    back = like(separate())
    inverse = dcp.weight_map(FUSED, inverse=True, vocab=13, hidden=24)
    dcp.load(back, checkpoint_id=tmp_path / "converted", map=inverse, no_dist=True)
    assert_equal(back, separate())


@dataclass(frozen=True)
class Case:
    """A rule, its tensors on both sides, and their cuts into boxes."""

    rule: dict[str, Any]
    sizes: dict[str, int]
    sources: dict[str, torch.Tensor]
    target: torch.Tensor
    cuts: list[list[int]]
    order: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw tensors with axes in any order and any dimensions, which are concatenated in a target of any order
    and dimensions, followed by zeros."""
    common = ["a", "b", "c"][: draw(st.integers(1, 3))]
    parts = [f"p{number}" for number in range(draw(st.integers(1, 3)))]
    sizes = {name: draw(st.integers(1, 4)) for name in (*common, *parts)}
    sizes["pad"] = draw(st.integers(0, 3))

    def dims(names: list[str]) -> list[list[str]]:
        order = draw(st.permutations(names))
        ends = sorted(draw(st.sets(st.integers(1, len(order)), max_size=3)) | {len(order)})
        return [order[low:high] for low, high in itertools.pairwise([0, *ends])]

    def arranged(tensor: torch.Tensor, names: list[str], ways: list[list[str]]) -> torch.Tensor:
        flat = [name for way in ways for name in way]
        moved = tensor.permute([names.index(name) for name in flat])
        extents = dict(zip(names, tensor.shape, strict=True))
        made = moved.reshape([math.prod(extents[name] for name in way) for way in ways])
        return made.clone(memory_format=torch.contiguous_format)

    sources, wholes, texts = {}, [], {}
    for number, part in enumerate(parts):
        names = [*common, part]
        whole = numbered(*(sizes[name] for name in names), first=1000 * number)
        ways = dims(names)
        sources[f"s{number}"] = arranged(whole, names, ways)
        texts[f"s{number}"] = " ".join(f"({' '.join(way)})" for way in ways)
        wholes.append(whole)
    ways = dims([*common, "all"])
    target = arranged(torch.cat(wholes, dim=-1), [*common, "all"], ways)
    target = torch.cat([target, torch.zeros(sizes["pad"], *target.shape[1:])])
    text = [" ".join(f"({' + '.join(parts)})" if name == "all" else name for name in way) for way in ways]
    text[0] += " + pad"
    rule = {"from": texts, "to": {"t": " ".join(f"({each})" for each in text)}, "padding": ["pad"]}
    shapes = [*(tensor.shape for tensor in sources.values()), target.shape]
    cuts = [[draw(st.integers(1, min(3, max(n, 1)))) for n in shape] for shape in shapes]
    return Case(rule, sizes, sources, target, cuts, draw(st.permutations(range(target.ndim))))


def claimed(case: Case, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every other box of the target in one permuted tensor, and the expected tensor."""
    shape = tuple(case.target.shape)
    boxes = grid(shape, case.cuts[-1])[::2]
    back = [case.order.index(dim) for dim in range(len(shape))]
    local = torch.full([shape[dim] for dim in case.order], -1, dtype=kind).permute(back)
    offsets, sizes = (tuple(each) for each in zip(*boxes, strict=True))
    wanted = torch.full_like(local, -1)
    for offset, size in boxes:
        box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        wanted[box] = case.target[box].to(kind)
    claim = {"global_shape": shape, "global_offsets": offsets, "local_offsets": offsets}
    for name, value in {**claim, "local_sizes": sizes}.items():  # make a `dcp.CheckpointableTensor`
        setattr(local, name, value)
    return local, wanted


def test_any_map_loads_any_shards(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every element of a rank's boxes follows the rule, and no other element is touched."""

    @examples(600, quick=12)
    @given(
        cases(),
        st.sampled_from([torch.float32, torch.float64]),
        st.sampled_from(["blocks", "full", "none"]),
        st.booleans(),
    )
    def check(case: Case, kind: torch.dtype, verify: Any, scatters: bool) -> None:
        cuts = zip(case.sources, case.cuts, strict=False)
        boxes = {name: grid(tuple(case.sources[name].shape), own) for name, own in cuts}
        path = tmp_path_factory.mktemp("case")
        store = RecordingStore(str(path)) if scatters else PosixStore(path)
        save_sharded(store, case.sources, boxes, files=2)
        local, wanted = claimed(case, kind)
        weights = {"rules": [case.rule], "sizes": case.sizes}
        reader = dcp.FileSystemReader(path, verify=verify, open_store=lambda _: store)
        dcp.load({"t": local}, storage_reader=reader, map=weights, dtype="cast", no_dist=True)
        assert torch.equal(local, wanted)

    check()


def test_read_selects_mapped_names(saved: Path) -> None:
    """`dcp.read` selects entries by their mapped names, without a state dict."""
    assert_equal(dcp.read(saved, map=FUSED), fused())
    found = dcp.read(saved, map=FUSED, only="0.d*", exclude="emb.weight", rename={"^0": "1"})
    assert found.keys() == {"1.down.weight"}
    assert torch.equal(found["1.down.weight"], fused()["0.down.weight"])
    half = dcp.read(saved, map=FUSED, only="0.qk.*", dtype="float16")
    assert torch.equal(half["0.qk.weight"], fused()["0.qk.weight"].half())
    with pytest.raises(MissingKeyError, match=r"0\.q\.weight"):
        dcp.read(saved, map=FUSED, only="0.q.weight")


def test_a_map_takes_sizes_from_config_json(tmp_path: Path) -> None:
    """A ready map takes sizes from the config.json beside the weights, on one rank and on two."""
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2, "hidden_size": 8, "head_dim": 4}')
    weights = {"model.layers.0.self_attn.q_proj.weight": numbered(8, 8)}
    save_file(weights, tmp_path / "model.safetensors")
    for ranks in (1, 2):
        run_ranks(ranks, load_by_config, str(tmp_path))


class Fused(nn.Module):
    """A model with the fused names."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Module()
        block.qk = nn.Linear(WIDTH, GROUPS * (QUERIES + 1) * HEAD, bias=False)
        block.v = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        block.gate_up = nn.Parameter(torch.zeros(48, WIDTH))
        block.down = nn.Linear(WIDTH, 24, bias=False)
        self.add_module("0", block)
        self.emb = nn.Embedding(16, WIDTH)
        self.experts = nn.Parameter(torch.zeros(5, WIDTH, 8))
        self.final = nn.LayerNorm(WIDTH, bias=False)


def sharded(kind: str) -> nn.Module:
    """Return the fused model under FSDP2, or under FSDP2 and tensor parallelism."""
    model = Fused()
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        return model
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0.qk": ColwiseParallel(), "0.v": ColwiseParallel(), "0.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    return model


def load_sharded(rank: int, world_size: int, path: str, kind: str) -> tuple[int, int]:
    """Load into a sharded model, compare it with a plain one, and return (needed bytes, local bytes)."""
    model = sharded(kind)
    rename = {r"^model\.": ""}
    report = dcp.load({"model": model}, checkpoint_id=path, map=FUSED, rename=rename, verify="none")
    state: dict[str, Any] = model.state_dict()
    assert_equal({name: tensor.full_tensor() for name, tensor in state.items()}, fused())
    return report.bytes_needed, sum(tensor.to_local().nbytes for tensor in state.values())


@pytest.mark.parametrize("kind", [pytest.param("fsdp", marks=pytest.mark.exhaustive), "fsdp and tp"])
def test_a_mapped_load_of_a_sharded_model(saved: Path, kind: str) -> None:
    """With FSDP2, alone or over tensor parallelism, each rank needs its own bytes, except padding."""
    results, stored = run_ranks(4, load_sharded, str(saved), kind), sum(t.nbytes for t in separate().values())
    padding = 3 * WIDTH * 4
    assert all(local - padding <= needed <= local for needed, local in results)
    assert sum(needed for needed, _ in results) >= stored
    assert kind != "fsdp" or sum(needed for needed, _ in results) == stored


def test_errors_have_the_mapped_names(saved: Path) -> None:
    """Errors are those of a load without a map, with the mapped names."""

    def load(state: dict[str, torch.Tensor], **options: Any) -> dcp.LoadReport:
        return dcp.load(state, checkpoint_id=saved, map=FUSED, no_dist=True, **options)

    with pytest.raises(ShapeMismatchError, match=r"0\.gate_up"):
        load(like(fused()) | {"0.gate_up": torch.zeros(47, WIDTH)})
    state = like(fused()) | {"more": torch.zeros(2), "most": torch.zeros(2)}
    with pytest.raises(MissingKeyError) as missing:
        load(state)
    assert missing.value.fqns == load(state, allow_partial_load=True).missing == ["more", "most"]
    assert_equal(state, fused())
    halves = {name: tensor.half() for name, tensor in like(fused()).items()}
    with pytest.raises(DtypeMismatchError, match=r"0\.gate_up.*and 4 more"):
        load(halves)
    assert sorted(load(halves, dtype="cast").cast) == sorted(halves)
    assert_equal(halves, {name: tensor.half() for name, tensor in fused().items()})
    with pytest.raises(PlanError, match="share memory"):
        load({"experts": torch.zeros(1, WIDTH, 8).expand(5, WIDTH, 8)})


@pytest.mark.parametrize("other", [7, torch.ones(3)], ids=["value", "tensor"])
def test_no_tensor_gets_the_name_of_another_entry(other: object, tmp_path: Path) -> None:
    """Load, save and conversion refuse a map that renames a tensor to an existing entry."""
    state, renamed = {"a": torch.ones(2), "b": other}, {"rules": [{"from": "a", "to": "b"}]}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(PlanError, match="renames a tensor to 'b'"):
        dcp.load({"b": torch.zeros(2)}, checkpoint_id=tmp_path / "saved", map=renamed, no_dist=True)
    refused = "renames a tensor to 'b'" if isinstance(other, int) else "no rule matches 'b'"
    with pytest.raises(PlanError, match=refused):
        dcp.save(state, checkpoint_id=tmp_path / "mapped", map=renamed, no_dist=True)
    with pytest.raises(PlanError, match=refused):
        dcp.convert(tmp_path / "saved", tmp_path / "mapped", to="dcp", map=renamed, executor="inline")
    assert not (tmp_path / "mapped").exists()


def test_tensors_without_a_rule_keep_their_names(tmp_path: Path) -> None:
    """Tensors without a rule keep their names; one beside mapped tensors must be requested or allowed."""
    more = {"0.q.bias": numbered(4), "opt.q": numbered(3), "step": 7}
    dcp.save(separate() | more, checkpoint_id=tmp_path, no_dist=True)
    state = like(fused())
    with pytest.raises(
        UnexpectedKeyError, match=r"'0\.q\.bias'.*to the state dict, and the map a rule\."
    ) as caught:
        dcp.load(state, checkpoint_id=tmp_path, map=FUSED, no_dist=True)
    assert caught.value.fqns == ["0.q.bias"]
    report = dcp.load(state, checkpoint_id=tmp_path, map=FUSED, exclude="0.q.bias", no_dist=True)
    assert sorted(report.unexpected) == ["opt.q", "step"]
    assert_equal(state, fused())
    report = dcp.load(state, checkpoint_id=tmp_path, map=FUSED, unexpected="ignore", no_dist=True)
    assert sorted(report.unexpected) == ["0.q.bias", "opt.q", "step"]
    given: dict[str, Any] = {"0.q.bias": torch.zeros(4), "opt": {"q": torch.zeros(3)}, "step": 0}
    dcp.load(state | given, checkpoint_id=tmp_path, map=FUSED, no_dist=True)
    assert torch.equal(given["0.q.bias"], numbered(4))
    assert torch.equal(given["opt"]["q"], numbered(3))


WAYS: dict[str, Any] = {
    "load": lambda state, path, weights: dcp.load(state, checkpoint_id=path, map=weights),
    "save": lambda state, path, weights: dcp.save(state, checkpoint_id=f"{path}-saved", map=weights),
    "read": lambda state, path, weights: dcp.read(path, map=weights),
    "prove": lambda state, path, weights: dcp.prove(state, path, map=weights),
    "restore": lambda state, path, weights: dcp.CheckpointManager(path).restore(state, map=weights),
    "async_save": lambda state, path, weights: dcp.async_save(
        state, checkpoint_id=f"{path}-saved", map=weights
    ).result(),
}


def wrong_maps(rank: int, world_size: int, path: str) -> dict[str, str]:
    """Load with a map file on one host only, with different maps, and with a planner without maps."""
    state = {"final.weight": torch.zeros(WIDTH)}
    found = {
        way: error_of(partial(act, state, path, Path(path, f"map{rank}.toml"))) for way, act in WAYS.items()
    }
    own = {"rules": [{"from": "norm.weight", "to": f"norm{rank}"}]}
    for way in ("load", "save"):
        named = {"load": f"norm{rank}", "save": "norm.weight"}[way]
        found[f"other maps, {way}"] = error_of(partial(WAYS[way], {named: torch.zeros(WIDTH)}, path, own))
    planner = TakesObjects() if rank else None
    found["planner"] = error_of(lambda: dcp.load(state, checkpoint_id=path, planner=planner, map=FUSED))
    return found


def test_every_rank_raises_for_an_invalid_map(saved: Path) -> None:
    """Every function with map= raises on all ranks for a map that one rank cannot use, without a wait."""
    (saved / "map0.toml").write_text('rules = [{ from = "{rest:*}", to = "{rest:*}" }]')
    for found in run_ranks(2, wrong_maps, str(saved)):
        assert all("map1.toml does not exist" in found[way] for way in WAYS), found
        for way in ("load", "save"):
            assert "the option 'map' is not the same on all ranks" in found[f"other maps, {way}"]
        assert "map= requires" in found["planner"]
    with pytest.raises(OptionError, match="map= requires"):
        dcp.load({}, storage_reader=stock.FileSystemReader(saved), map=FUSED, no_dist=True)
    with pytest.raises(OptionError, match="did you mean llama:hf-to-titan"):
        dcp.load({}, checkpoint_id=saved, map="llama:hf-to-titn", no_dist=True)


def test_moments_of_an_optimizer_are_mapped(tmp_path: Path) -> None:
    """Moments of an optimizer are mapped like the weights by rules with their names."""
    own = {name: tensor for name, tensor in separate().items() if name.startswith(("0.q", "0.k"))}
    state = {"model": own, "optim": {"state": {name: {"exp_avg": t * 2} for name, t in own.items()}}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    axes = {"q": "(groups queries two half) width", "k": "(groups key two half) width"}
    rules = [
        {
            "from": {f"{before}{{layer}}.{name}.weight{behind}": text for name, text in axes.items()},
            "to": {f"{before}{{layer}}.qk.weight{behind}": "(groups (queries + key) half two) width"},
        }
        for before, behind in (("model.", ""), ("optim.state.", ".exp_avg"))
    ]
    wanted = fused()["0.qk.weight"]
    found: dict[str, Any] = {
        "model": {"0.qk.weight": torch.zeros_like(wanted)},
        "optim": {"state": {"0.qk.weight": {"exp_avg": torch.zeros_like(wanted)}}},
    }
    dcp.load(found, checkpoint_id=tmp_path, map={"rules": rules, "sizes": FUSED["sizes"]}, no_dist=True)
    assert torch.equal(found["model"]["0.qk.weight"], wanted)
    assert torch.equal(found["optim"]["state"]["0.qk.weight"]["exp_avg"], wanted * 2)


def load_by_config(rank: int, world_size: int, path: str) -> None:
    """Load by sizes that are only in the configuration, which the coordinator reads."""
    name, mesh = "layers.0.attention.qkv_linear.wq.weight", init_device_mesh("cpu", (world_size,))
    state = {name: distribute_tensor(torch.zeros(8, 8), mesh, [Shard(1)])}
    dcp.load(dict(state), checkpoint_id=path, map="llama:hf-to-titan")
    wanted = numbered(8, 8).view(2, 2, 2, 8).transpose(1, 2).reshape(8, 8)
    assert torch.equal(state[name].full_tensor(), wanted)


def load_rows(rank: int, world_size: int, path: str) -> tuple[int, int]:
    """Load a quarter of the rows of a fused matrix, and return the bytes needed and read."""
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"both": distribute_tensor(torch.zeros(4096, 1024), mesh, [Shard(0)])}
    weights = {
        "rules": [
            {
                "from": {"a": "(groups head) width", "b": "(groups head2) width"},
                "to": {"both": "(groups (head + head2)) width"},
            }
        ],
        "sizes": {"groups": 4},
    }
    report = dcp.load(state, checkpoint_id=path, map=weights, verify="none")
    a, b = (numbered(2048, 1024, first=at) for at in (0, 7))
    rows = slice(512 * rank, 512 * rank + 512)
    assert torch.equal(state["both"].to_local(), torch.cat([a[rows], b[rows]]))
    return report.bytes_needed, report.bytes_read


def test_a_rank_reads_only_what_it_needs(tmp_path: Path) -> None:
    """A rank reads the data of its own groups alone."""
    state = {name: numbered(2048, 1024, first=at) for name, at in (("a", 0), ("b", 7))}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    for needed, read in run_ranks(4, load_rows, str(tmp_path)):
        assert needed == 4096 * 1024
        assert read <= needed + (64 << 10)

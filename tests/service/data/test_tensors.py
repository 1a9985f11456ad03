"""Tensors over HTTP: whole, sliced, by shards, and compared between checkpoints."""

from __future__ import annotations

import io
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors

from tests.service.data.conftest import STATE, DataSite
from tests.support.conversion import many_kinds, sharded_tensors
from tests.support.sharded import grid, save_sharded
from tests.support.values import raw

SLICES = ("0", "3:9", "::-7", "-5:,2:8", "...,1", ":,::3", "5,6", "100:50", "::-1,::-1", "1200:,4")


def data_of(site: DataSite, key: str, name: str, **params: Any) -> httpx.Response:
    """Request the data of a tensor."""
    return site.http.get(f"{site.known(key)}/tensors/data", params={"name": name, **params})


def array_of(answer: httpx.Response) -> Any:
    """Load an array from a .npy response."""
    return np.load(io.BytesIO(answer.raise_for_status().content), allow_pickle=False)


def test_each_kind_of_tensor(site: DataSite) -> None:
    """A tensor is sent as .safetensors in its own dtype, and as .npy in float32 if numpy lacks the dtype."""
    for name, tensor in many_kinds().items():
        stored = load_safetensors(data_of(site, "kinds", name, format="safetensors").content)[name]
        assert (stored.dtype, stored.shape) == (tensor.dtype, tensor.shape)
        assert raw(stored) == raw(tensor), name
        answer = data_of(site, "kinds", name)
        array = array_of(answer)
        is_cast = answer.headers["x-dcp-dtype"] != str(array.dtype)
        wanted = (tensor.float() if is_cast else tensor).numpy()
        assert answer.headers["x-dcp-dtype"] == str(tensor.dtype).removeprefix("torch.")
        assert array.shape == tuple(tensor.shape), name
        assert np.array_equal(array, wanted, equal_nan=array.dtype.kind in "fc"), name


@pytest.mark.parametrize("name", ["large", "kind.bfloat16"])
def test_slices_equal_numpys(site: DataSite, name: str) -> None:
    """A slice equals numpy's slice of the whole tensor, also in ranges of the file."""
    array = many_kinds()[name].float().numpy()
    for text in SLICES:
        answer = data_of(site, "kinds", name, slice=text)
        try:
            wanted = eval(f"array[{text}]", {"array": array})
        except IndexError:
            assert answer.status_code == 422
            continue
        assert np.array_equal(array_of(answer), wanted, equal_nan=True), text
        middle = len(answer.content) // 2 + 1
        part = site.http.get(str(answer.url), headers={"Range": f"bytes=7-{middle}"})
        assert part.content == answer.content[7 : middle + 1]
        stored = data_of(site, "kinds", name, slice=text, format="safetensors")
        found = load_safetensors(stored.content)[name].float().numpy()
        assert np.array_equal(found, wanted, equal_nan=True), text
    for shard, tensor in sharded_tensors().items():  # across the chunks of all ranks
        answer = data_of(site, "sharded", shard, slice="1:,2:-1", format="safetensors")
        assert raw(load_safetensors(answer.content)[shard]) == raw(tensor[1:, 2:-1]), shard


def test_unknown_tensors_and_invalid_slices_are_refused(site: DataSite) -> None:
    """An unknown tensor gets 404 and an invalid slice 422; a slice has an ETag of its own."""
    for name, text, status in (
        ("none", None, 404),
        ("step", None, 404),
        *(("model.w", text, 422) for text in ("1,2,3", "a", "1:2:0", "1,,2", ":" * 5, "9" * 30)),
    ):
        answer = data_of(site, "run/step-3", name, **({"slice": text} if text else {}))
        assert answer.status_code == status, (name, text)
        assert answer.headers["content-type"] == "application/problem+json"
    whole, taken = (data_of(site, "run/step-3", "model.w", **given) for given in ({}, {"slice": "-1"}))
    assert whole.headers["x-dcp-shape"] == "200,300" and whole.headers["etag"] != taken.headers["etag"]
    assert site.http.get(f"{site.known()}/tensors/data").status_code == 422


def test_shards(own: DataSite) -> None:
    """Shards list the rank and the box of each chunk, in pages; ranks list tensors and bytes."""
    tensors = {"a": torch.arange(64.0).reshape(8, 8), "b": torch.ones(5)}
    save_sharded(own.folder / "main/sharded", tensors, {"a": grid((8, 8), (2, 2))})
    url = f"{own.known('sharded')}/shards"
    page = own.http.get(url, params={"limit": 1}).json()
    (tensor,) = page["items"]
    boxes = [(chunk["rank"], chunk["offsets"]) for chunk in tensor["chunks"]]
    assert tensor["chunk_count"] == 4
    assert boxes == [(0, [0, 0]), (1, [0, 4]), (2, [4, 0]), (3, [4, 4])]
    rest = own.http.get(url, params={"cursor": page["next_cursor"]}).json()
    assert ([item["fqn"] for item in rest["items"]], rest["next_cursor"]) == (["b"], None)
    ranks = own.http.get(f"{url}/ranks").json()["items"]
    shares = [(share["rank"], share["tensors"], share["tensor_bytes"]) for share in ranks]
    assert shares == [(0, 2, 84), (1, 1, 64), (2, 1, 64), (3, 1, 64)]
    assert own.http.get(url, params={"cursor": "nonsense"}).status_code == 422
    assert own.http.get(url, params={"glob": "b"}).json()["items"][0]["fqn"] == "b"


def test_differences(own: DataSite) -> None:
    """Checkpoints are compared by checksums if both have them, and by structure otherwise."""
    own.save("run/step-3")
    own.save("run/step-4", {"model": {"w": STATE["model"]["w"] + 1, "new": torch.ones(1)}, "step": 4})
    torch.distributed.checkpoint.save(
        {"w": torch.ones(2)}, checkpoint_id=own.folder / "main/stock", no_dist=True
    )
    before = own.known().rpartition("/")[2]
    url = f"{own.known('run/step-4')}/diff"
    found = own.http.get(url, params={"before": before}).json()
    kinds = {item["fqn"]: item["kind"] for item in found["tensors"]}
    assert kinds == {"model.w": "changed", "model.b": "removed", "model.new": "added"}
    assert (found["basis"], found["counts"]["changed"]) == ("checksums", 1)
    assert [(item["fqn"], item["kind"]) for item in found["objects"]] == [("step", "changed")]
    page = own.http.get(url, params={"before": before, "limit": 2}).json()
    rest = own.http.get(url, params={"before": before, "limit": 2, "cursor": page["next_cursor"]}).json()
    assert [*page["tensors"], *rest["tensors"]] == found["tensors"]
    plain = own.http.get(url, params={"before": before, "basis": "structure"}).json()
    assert (plain["counts"]["changed"], plain["equal_tensors"]) == (0, 1)
    stock = own.http.get(f"{own.known('stock')}/diff", params={"before": before}).json()
    assert stock["basis"] == "structure"
    assert own.http.get(url, params={"before": 999_999}).status_code == 404

"""Files of torch.save and safetensors on a real S3 server: few ranged requests, whatever is in them."""

from __future__ import annotations

import io

import torch
from safetensors.torch import save

import dcp
from tests.support.fault_doors import verified
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import raw_s3

_TENSORS = 3000


def test_files_cost_few_requests(s3_proxy: FaultProxy, s3_root: str) -> None:
    """3,000 tensors of 256 bytes: a torch.save file loads by some ten requests, safetensors by fewer."""
    block = torch.randn(_TENSORS, 64, generator=torch.Generator().manual_seed(3))
    state = {f"layers.{number}.w": block[number].clone() for number in range(_TENSORS)}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with raw_s3(s3_proxy.server) as direct:
        direct.write(f"{s3_root}/model.pt", buffer.getvalue())
        direct.write(f"{s3_root}/hub/model.safetensors", save(state))
    options = s3_proxy.storage_options
    for source, limit in (("model.pt", 13), ("hub/model.safetensors", 8), ("hub", 14)):
        s3_proxy.log.clear()
        loaded = torch.zeros_like(block)
        views = {f"layers.{number}.w": loaded[number] for number in range(_TENSORS)}
        dcp.load(views, checkpoint_id=f"{s3_root}/{source}", storage_options=options, no_dist=True)
        assert torch.equal(loaded, block)
        assert s3_proxy.counts().total() <= limit, (source, s3_proxy.counts())
        assert verified(f"{s3_root}/{source}", **options)["ok"]
    one = dcp.open_index(f"{s3_root}/model.pt", storage_options=options)
    assert one.tensor_count == _TENSORS and list(one.files) == ["model.pt"]


def test_a_folder_may_be_called_like_a_file(s3_proxy: FaultProxy, s3_root: str) -> None:
    """Only an object of that very name is a file."""
    options = s3_proxy.storage_options
    dcp.save(
        {"w": torch.ones(3)}, checkpoint_id=f"{s3_root}/last.ckpt", storage_options=options, no_dist=True
    )
    target = {"w": torch.zeros(3)}
    dcp.load(target, checkpoint_id=f"{s3_root}/last.ckpt", storage_options=options, no_dist=True)
    assert target["w"].tolist() == [1.0, 1.0, 1.0]

"""The Python of README and pages runs as written. Internal: the demo's place stands in for a bucket.

tests/service/operations/test_pages_of_service.py runs the blocks that need the service.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dcp
from dcp.demo.places import newest_checkpoint
from dcp.demo.s3_server import S3Server
from dcp.state_dict import StateDictOptions, get_optimizer_state_dict
from tests.support.programs import Program
from tests.support.s3 import raw_s3

ROOT = Path(__file__).parents[2]


def blocks_of(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run_page(page: str, names: dict[str, object], count: int) -> None:
    """Run the first ``count`` blocks in order, with the names that the page assumes."""
    blocks = blocks_of(page)
    assert len(blocks) >= count
    for block in blocks[:count]:
        exec(compile(block, page, "exec"), names)


RUN: dict[str, tuple[int, str]] = {
    "README.md": (1, "project/test_pages.py"),
    "docs/compare/index.md": (1, "project/test_pages.py"),
    "docs/how-to/compare-by-digest.md": (2, "project/test_pages.py"),
    "docs/how-to/convert.md": (1, "project/test_pages.py"),
    "docs/how-to/find-the-best-and-export.md": (2, "service/client/test_client_docs.py"),
    "docs/how-to/manage-a-run.md": (4, "project/test_pages.py"),
    "docs/how-to/map-weights.md": (4, "project/test_pages.py"),
    "docs/how-to/merge.md": (1, "project/test_pages.py"),
    "docs/how-to/save-and-load.md": (4, "project/test_pages.py"),
    "docs/how-to/save-asynchronously.md": (1, "project/test_pages.py"),
    "docs/how-to/test-your-parallelism.md": (1, "conformance/test_parallelism.py"),
    "docs/how-to/use-a-trainer.md": (4, "project/test_pages.py"),
    "docs/how-to/use-an-object-store.md": (2, "project/test_pages.py"),
    "docs/how-to/use-the-client.md": (9, "service/client/test_client_docs.py"),
    "docs/how-to/write-a-plug-in.md": (7, "examples/test_extensions.py"),
    "docs/how-to/write-a-training-script.md": (3, "project/test_pages.py"),
    "docs/reference/rest-conventions.md": (2, "service/operations/test_documented.py"),
    "docs/tutorial/catalog.md": (1, "service/operations/test_pages_of_service.py"),
    "docs/tutorial/first-run.md": (1, "project/test_pages.py"),
}
"""Python blocks of each page, and the test that runs them: a new block needs a test, then a new number."""


def test_every_block_of_python_is_run_by_a_test() -> None:
    """The table lists each page with blocks and their number, and the named test reads the page."""
    pages = ["README.md", *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
    counts = {
        page: len(re.findall(r"^ *```python$", (ROOT / page).read_text(), re.MULTILINE)) for page in pages
    }
    assert {page: count for page, count in counts.items() if count} == {
        page: count for page, (count, _) in RUN.items()
    }
    for page, (_, test) in RUN.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text(), (page, test)


def test_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 100th of 1000 steps is saved, three stay, and the next run has no step to train."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 4)
    steps = 0

    def train_step() -> torch.Tensor:
        nonlocal steps
        steps += 1
        return torch.tensor(1.0 / steps)

    for expected in (1000, 1000):
        optimizer = torch.optim.AdamW(model.parameters())
        run_page("README.md", {"model": model, "optimizer": optimizer, "train_step": train_step}, 1)
        assert steps == expected
    with dcp.CheckpointManager("runs/first", no_dist=True) as manager:
        assert manager.all_steps() == [800, 900, 1000]


def test_the_library_pages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: S3Server) -> None:
    """The pages on saving, managers, asynchronous saves, object stores and conversion run in this order."""
    monkeypatch.chdir(tmp_path)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    with raw_s3(s3_server) as server:
        server.client.create_bucket(Bucket="my-bucket")
    names: dict[str, object] = {"model": torch.nn.Linear(3, 4)}

    run_page("docs/how-to/save-and-load.md", names, 4)
    assert (tmp_path / "checkpoints" / "step-00001000" / "manifest.msgpack").exists()
    report = names["report"]
    assert getattr(report, "unexpected") == ["rng.rank-0"]  # noqa: B009 - names are objects to mypy
    assert names["state"]["step"] == 1000  # type: ignore[index]
    assert names["weights"]["weight"].dtype is torch.bfloat16  # type: ignore[index]

    run_page("docs/how-to/manage-a-run.md", names, 4)
    assert names["restored"] is None
    manager = dcp.CheckpointManager(tmp_path / "checkpoints" / "run", no_dist=True)
    assert manager.all_steps() == [50, 90, 100]  # each 50th and the last two; the best is one of these
    manager.close()

    run_page("docs/how-to/save-asynchronously.md", names, 1)
    assert dcp.open_index(tmp_path / "checkpoints" / "by-hand").tensor_count == 2

    run_page("docs/how-to/use-an-object-store.md", names, 1)
    assert dcp.open_index("s3://my-bucket/runs/by-hand").tensor_count == 2
    assert newest_checkpoint("s3://my-bucket/runs/first") == "step-00000010"
    options = blocks_of("docs/how-to/use-an-object-store.md")[1]
    options = options.replace("https://minio.example.com:9000", s3_server.endpoint_url)
    options = options.replace('"key": "..."', f'"key": "{s3_server.access_key}"')
    options = options.replace('"secret": "..."', f'"secret": "{s3_server.secret_key}"')
    exec(compile(options, "use-an-object-store.md", "exec"), names)
    assert dcp.open_index("s3://my-bucket/step-100").fqns

    run_page("docs/how-to/convert.md", names, 1)
    torch_state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch_state["model"]["weight"].dtype == torch.bfloat16
    assert len(list((tmp_path / "checkpoints" / "from-file").glob("*.distcp"))) >= 1


class Fused(torch.nn.Module):
    """Module with the target names of the map."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(6, 48, bias=False)


def unfused_weights() -> dict[str, torch.Tensor]:
    """Return tensors with the source names of the map."""
    sizes = {"q": 32, "k": 8, "v": 8}
    layers = {
        f"layers.{layer}.{name}.weight": torch.rand(size, 6)
        for layer in range(2)
        for name, size in sizes.items()
    }
    return {**layers, "norm.weight": torch.rand(6)}


def test_weight_maps_fuse_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions, loads, saves and a manager map names and layouts in both directions."""
    monkeypatch.chdir(tmp_path)
    state = unfused_weights()
    save_file(state, "apart.safetensors")
    layers = torch.nn.ModuleList([Fused(), Fused()])
    model = torch.nn.ModuleDict(
        {"model": torch.nn.ModuleDict({"layers": layers, "norm": torch.nn.LayerNorm(6, bias=False)})}
    )
    run_page("docs/how-to/map-weights.md", {"model": model}, 3)
    assert dcp.read("fused")["model.norm.weight"].shape == (6,)
    fused, back = dcp.read("fused")["model.layers.1.qkv.weight"], load_file("back.safetensors")
    assert torch.equal(fused.view(2, 6, 4, 6)[:, 4], state["layers.1.k.weight"].view(2, 4, 6))
    assert torch.equal(model.state_dict()["model.layers.1.qkv.weight"], fused)
    for saved in (back, dcp.read("as-before"), dcp.read("run/step-00000001")):
        assert saved.keys() == state.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in state.items())


@pytest.mark.exhaustive
def test_conversions_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of the page saves equal tensors."""
    import transformers

    monkeypatch.chdir(tmp_path)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    build: Any = transformers.AutoModelForCausalLM.from_config
    mixtral = build(transformers.MixtralConfig(**sizes, **heads, vocab_size=37, tie_word_embeddings=False))
    mixtral.save_pretrained("Mixtral-8x7B")
    block = blocks_of("docs/how-to/map-weights.md")[3]
    exec(compile(block, "map-weights.md", "exec"), {"dcp": dcp, "mixtral": mixtral})
    stored, saved = dcp.read("Mixtral-8x7B"), dcp.read("as-files")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in stored.items())


def test_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page merges a weighted sum of files, and the mean and the moving average of a run."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"a": 1.0, "b": 2.0}.items():
        save_file({"weight": torch.full((4,), value)}, f"{name}.safetensors")
    model = torch.nn.Linear(1, 1, bias=False)
    with dcp.CheckpointManager("runs/first", no_dist=True) as manager:
        for step in range(1, 10):
            torch.nn.init.constant_(model.weight, step)
            manager.save(step, {"model": model}, force=True)
    run_page("docs/how-to/merge.md", {}, 1)
    soup = load_file("soup.safetensors")["weight"]
    assert soup.dtype is torch.bfloat16
    assert torch.equal(soup, torch.full((4,), 1.3).bfloat16())
    assert dcp.read("mean")["model"]["weight"].item() == 5.5
    assert 5.5 < dcp.read("ema")["model"]["weight"].item() < 5.6


def test_the_best_step_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page exports the step with the lowest loss; tests/service tests the catalog's block."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    run_page("docs/how-to/find-the-best-and-export.md", names, 1)
    assert names["step"] == 200
    assert load_file("best.safetensors").keys() == {"model.weight", "model.bias"}


@pytest.mark.exhaustive
def test_digests_and_the_proof_of_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof reads no payload, and names a changed tensor."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    run_page("docs/how-to/compare-by-digest.md", names, 2)
    assert getattr(names["finding"], "fqn") == "model.bias"  # noqa: B009 - names are objects to mypy


class Learner(torch.nn.Module):
    """Model with the forward calls of the Trainer and of the page's Lightning block."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss as a Hugging Face model does."""
        return {"loss": (self.layer(x) - labels).square().mean()}


def test_the_comparison_finds_the_flipped_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stock torch loads one wrong value; dcphub names the tensor."""
    monkeypatch.chdir(tmp_path)
    run_page("docs/compare/index.md", {}, 1)
    stock, verdict = capsys.readouterr().out.splitlines()
    assert stock == "torch.distributed.checkpoint loaded 1 wrong value"
    assert verdict.startswith("dcp ") and "tensor 'weight' is damaged" in verdict


@pytest.mark.exhaustive
def test_the_trainers_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer, Accelerate, torchdata and Lightning save to the folders on the page."""
    lightning = pytest.importorskip("lightning.pytorch")
    monkeypatch.chdir(tmp_path)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        """Minimal module for training."""

        def __init__(self) -> None:
            super().__init__()
            self.learner = Learner()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            """Return the loss."""
            return self.learner(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """Return plain SGD."""
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> torch.utils.data.DataLoader[dict[str, torch.Tensor]]:
            """Return a loader of the page's data."""
            return torch.utils.data.DataLoader(data)  # type: ignore[arg-type]

    data = [{"x": torch.rand(3), "labels": torch.rand(1)} for _ in range(20)]
    model = Learner()
    optimizer = torch.optim.AdamW(model.parameters())
    names = {"model": model, "optimizer": optimizer, "data": data, "module": Module()}
    run_page("docs/how-to/use-a-trainer.md", names, 4)
    for folder in ("out/checkpoint-30", "project/checkpoints/checkpoint_0", "lightning/last.ckpt"):
        assert dcp.open_index(folder).tensor_count


def steps_of(folder: Path) -> list[int]:
    """Return the saved steps of the quick start's run."""
    with dcp.CheckpointManager(folder / "runs" / "first", no_dist=True, handle_sigterm=False) as manager:
        return manager.all_steps()


def run_until_saved(folder: Path, arguments: list[str], by: signal.Signals) -> int:
    """Run until a new step is saved, then send a signal. Return the first step of the run."""
    before = max(steps_of(folder), default=0)
    # unbuffered: torchrun's signal may end a finished rank before it flushes its output
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with Program(*arguments, cwd=folder, env=environment, stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 240
        while max(steps_of(folder), default=0) <= before:
            assert process.poll() is None, f"ended by itself, with status {process.returncode}"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(by)
        printed = process.communicate(timeout=120)[0]
    return int(re.findall(r"begins with step (\d+)", printed)[0])


def test_the_quick_start_resumes_after_a_kill(tmp_path: Path) -> None:
    """A killed run starts again after the newest step, and SIGTERM ends it, as the page says."""
    (script,) = blocks_of("docs/tutorial/first-run.md")
    (tmp_path / "train.py").write_text(script)
    assert run_until_saved(tmp_path, ["train.py"], signal.SIGKILL) == 1
    newest = max(steps_of(tmp_path))
    assert run_until_saved(tmp_path, ["train.py"], signal.SIGTERM) == newest + 1
    damage_a_byte(tmp_path)


def damage_a_byte(folder: Path) -> None:
    """Damage a byte of a tensor with the page's command, and assert that verify finds it."""
    page = (ROOT / "docs/tutorial/first-run.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith(("STEP=", "printf "))]
    assert len(lines) == 2
    script = "\n".join([*lines, f"{sys.executable} -m dcp verify $STEP"])
    verified = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True)
    assert verified.returncode == 1, verified.stderr
    assert re.search(r"checksum: .*'training\.", verified.stdout + verified.stderr)


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.exhaustive)])
def test_the_fsdp2_script_resumes_on_one_rank(tmp_path: Path, ranks: str) -> None:
    """A run saves ten steps, and resumes with the eleventh on one rank."""
    script = blocks_of("docs/how-to/write-a-training-script.md")[0]
    (tmp_path / "train_fsdp2.py").write_text(script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for count, last, first in ((ranks, "10", 1), ("1", "12", 11)):
        command = [*torchrun, count, "train_fsdp2.py", last]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["begins", "with", "step", str(first)]


def test_the_training_script_page_loads_fused_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load fills a fused parameter through views; a new parameter and new rates are unchanged."""
    monkeypatch.chdir(tmp_path)
    fused, renamed = blocks_of("docs/how-to/write-a-training-script.md")[1:3]
    stored = {f"attention.{name}.weight": torch.rand(2, 2) for name in "qkv"}
    dcp.save(stored, checkpoint_id="checkpoints/separate")
    model = torch.nn.Module()
    model.qkv = torch.nn.Linear(2, 6)
    exec(compile(fused, "fused", "exec"), {"dcp": dcp, "model": model})
    assert torch.equal(model.qkv.weight, torch.cat([*stored.values()]))

    by_name = StateDictOptions(flatten_optimizer_state_dict=True)
    old = torch.optim.AdamW([model.qkv.weight], lr=1e-3)
    model.qkv.weight.grad = torch.ones_like(model.qkv.weight)
    old.step()
    old.zero_grad()
    before = torch.nn.Module()
    before.qkv = torch.nn.Linear(2, 6, bias=False)
    before.qkv.weight = model.qkv.weight
    state = {"optimizer": get_optimizer_state_dict(before, old, options=by_name)}
    dcp.save(state, checkpoint_id="checkpoints/by-name")
    groups: list[dict[str, Any]] = [
        {"params": [model.qkv.bias], "lr": 0.5},
        {"params": [model.qkv.weight]},
    ]
    new = torch.optim.AdamW(groups, lr=0.25)
    exec(compile(renamed, "renamed", "exec"), {"dcp": dcp, "model": model, "optimizer": new})
    assert torch.equal(new.state[model.qkv.weight]["exp_avg"], old.state[model.qkv.weight]["exp_avg"])
    assert [group["lr"] for group in new.param_groups] == [0.5, 0.25]


def failing_loads(folder: Path) -> Iterator[tuple[str, dict[str, object], dict[str, Any]]]:
    """Yield checkpoint ids, state dicts and options of loads that fail."""
    good = str(folder / "run" / "step-00001000")
    state: dict[str, Any] = {"model": {"weight": torch.rand(3, 4), "bias": torch.rand(4)}}
    dcp.save({**state, "rng": dcp.PerRank(torch.get_rng_state())}, checkpoint_id=good)
    dcp.save({"config": ErrorOnLoad()}, checkpoint_id=folder / "objects")
    bfloat16: dict[str, Any] = {"model": {**state["model"], "weight": state["model"]["weight"].bfloat16()}}
    yield good, {"module.model": {"weight": torch.rand(3, 4)}}, {}
    yield good, {"model": {"weight": torch.rand(3, 4)}}, {}
    yield good, state, {"only": "modle"}
    yield good, {"model": {**state["model"], "weight": torch.rand(4, 4)}}, {}
    yield good, bfloat16, {}
    yield str(folder / "run"), state, {}
    yield str(folder / "objects"), {"config": None}, {}
    (data,) = Path(good).glob("*.distcp")
    for name in ("half", "flipped", "short", "gone"):
        shutil.copytree(good, folder / name)
    for index in ("manifest.msgpack", ".metadata"):
        (folder / "half" / index).unlink()
    flipped = bytearray(data.read_bytes())
    flipped[1500] ^= 1
    (folder / "flipped" / data.name).write_bytes(flipped)
    (folder / "short" / data.name).write_bytes(flipped[:100])
    (folder / "gone" / data.name).unlink()
    for name in ("half", "flipped", "short", "gone"):
        yield str(folder / name), {**state, "rng": dcp.PerRank(torch.get_rng_state())}, {}


class ErrorOnLoad:
    """Object outside of the allow-list."""


def test_the_messages_of_failed_loads_occur(tmp_path: Path) -> None:
    """Each message on the page occurs, apart from those that need several ranks or S3."""
    page = (ROOT / "docs/how-to/find-out-why-a-load-fails.md").read_text()
    blocks = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    listed = re.findall(r"^\w+Error: .*?(?=^\w+Error: |\Z)", "".join(blocks), re.MULTILINE | re.DOTALL)
    raised = []
    for checkpoint_id, state, options in failing_loads(tmp_path):
        with pytest.raises(dcp.CheckpointError) as caught:
            dcp.load(state, checkpoint_id=checkpoint_id, no_dist=True, **options)
        raised.append(f"{type(caught.value).__name__}: {caught.value}")
    apart = (
        "StorageError",
        "CollectiveTimeoutError",
        "PlanError: the ranks",
        "MissingKeyError: Missing key in checkpoint state_dict: 'rng",
    )
    for message in listed:
        if not message.startswith(apart):
            pattern = ".*".join(map(re.escape, message.strip().split("...")))
            assert any(re.match(pattern, text, re.DOTALL) for text in raised), (message, raised)


@pytest.mark.exhaustive
def test_the_quick_start_resumes_with_two_ranks(tmp_path: Path) -> None:
    """Two ranks with shards resume the run of one process, and one process resumes theirs."""
    (script,) = blocks_of("docs/tutorial/first-run.md")
    (tmp_path / "train.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for arguments in (["train.py"], [*torchrun, "train.py"], ["train.py"]):
        newest = max(steps_of(tmp_path), default=0)
        assert run_until_saved(tmp_path, arguments, signal.SIGTERM) == newest + 1


def test_every_page_is_two_links_away() -> None:
    """README and docs/index.md link to all pages below docs/."""
    linked = set()
    for page in ("README.md", "docs/index.md"):
        folder = (ROOT / page).parent
        for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", (ROOT / page).read_text()):
            place = (folder / target).resolve()
            linked |= set(place.glob("*.md")) if place.is_dir() else {place}
    assert not {path.resolve() for path in (ROOT / "docs").rglob("*.md")} - linked


def test_the_readme_fits_three_screens() -> None:
    """README has fewer than 800 words."""
    assert len((ROOT / "README.md").read_text().split()) < 800

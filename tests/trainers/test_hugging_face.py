"""Trainer and Accelerate, the real packages: killed in a save, resumed, and compared with whole runs."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from tests.support.crashes import Child, Ending, Group, in_lab, run_groups


def ran(ending: Ending) -> Any:
    """Return the value of a process that ended without an error."""
    assert ending.raised is None, ending.raised.traceback_text
    assert not ending.hung and not ending.signal
    return ending.value


def killed_and_resumed(root: str, *kinds: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Run each kind of training on two ranks to the end, and on two ranks that are killed in the second save.
    Resume the killed run on two ranks and on one. Return the losses."""
    from tests.support.trainer_runs import HuggingFaceRun, LoopRun

    first, second = [], []
    for number, (framework, options) in enumerate(kinds):
        make: Any = HuggingFaceRun if framework == "trainer" else LoopRun
        second_save = "checkpoint-6" if framework == "trainer" else "checkpoint_1"
        whole, other, alone = (f"{root}/{number}/{name}" for name in ("whole", "other", "alone"))
        first += [Group(2, make(whole, **options).run)]
        first += [Group(2, make(other, die_at=second_save, **options).run)]
        second += [Group(2, make(other, resume=True, **options).run)]
        second += [Group(1, make(alone, resume=True, **options | {"fsdp": False}).run)]
    begun = run_groups(first)
    for dying in begun[1::2]:  # of two ranks one may survive with an error
        assert any(ending.killed for ending in dying)
        assert all(ending.killed or ending.raised for ending in dying)
    for number in range(len(kinds)):
        shutil.copytree(f"{root}/{number}/other", f"{root}/{number}/alone")
    ended = run_groups(second)
    return [
        {"whole": ran(whole[0]), "two": ran(two[0]), "one": ran(one[0])}
        for whole, two, one in zip(begun[::2], ended[::2], ended[1::2], strict=True)
    ]


@pytest.mark.parametrize(
    ("options", "of_loop"),
    [
        pytest.param({"fsdp": True}, {}, id="fsdp-ddp"),
        pytest.param({}, {"fsdp": True}, id="ddp-fsdp", marks=pytest.mark.exhaustive),
        *(
            pytest.param(options, options, id=name, marks=pytest.mark.exhaustive)
            for name, options in (("fsdp-peft", {"fsdp": True, "peft": True}), ("ddp-peft", {"peft": True}))
        ),
    ],
)
def test_runs_killed_in_a_save_resume_exactly(
    tmp_path: Path, options: dict[str, Any], of_loop: dict[str, Any]
) -> None:
    """On as many ranks each loss equals a whole run's bit for bit; one rank, without shards, continues."""
    tied = {"tied": "fsdp" not in options}
    trainer, loop = in_lab(killed_and_resumed, str(tmp_path), ("trainer", options | tied), ("loop", of_loop))
    assert [step for step, _ in trainer["whole"]] == [2, 4, 6, 8]
    assert trainer["two"] == trainer["whole"]
    assert trainer["one"][0] == trainer["whole"][0]
    assert [step for step, _ in trainer["one"]] == [2, 4, 6, 8]
    assert len(loop["whole"]) == len(loop["one"]) == 9
    assert loop["two"] == loop["whole"]
    assert loop["one"][:3] == loop["whole"][:3]
    folders = tmp_path / "0" / "other", tmp_path / "1" / "other" / "checkpoints"
    there = [sorted(path.parent.name for path in folder.glob("*/manifest.msgpack")) for folder in folders]
    assert there == [["checkpoint-3", "checkpoint-6", "checkpoint-9"], ["checkpoint_1", "checkpoint_2"]]
    if "peft" in options:
        for checkpoint in (folders[0] / "checkpoint-9", folders[1] / "checkpoint_2"):
            names = {name for name in dcp.open_index(checkpoint).fqns if name.startswith("model.")}
            assert all("lora_" in name for name in names)
            assert {name.split(".")[-2] for name in names} == {"default", "second"}


def best_and_loaded(run: Any) -> tuple[float, float]:
    """Return the best loss of a run, and the loss of the final model."""
    trainer = run.make()
    trainer.train()
    return trainer.state.best_metric, trainer.evaluate()["eval_loss"]


def arguments_of_the_trainer(root: str) -> dict[str, Any]:
    """Run the Trainer with limits, best model, paths, its own checkpoints and damage. Return the results."""
    from transformers import Trainer

    from tests.support.trainer_runs import HuggingFaceRun

    def run(folder: str, **options: Any) -> Any:
        return ran(Child(HuggingFaceRun(f"{root}/{folder}", **options).run).wait())

    def there(folder: str) -> list[str]:
        return sorted(path.parent.name for path in Path(root, folder).glob("*/manifest.msgpack"))

    found: dict[str, Any] = {"whole": run("whole")}
    limited = {
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    options: dict[str, Any] = {
        "arguments": limited | {"metric_for_best_model": "loss", "greater_is_better": True}
    }
    found["best loss"] = ran(Child(best_and_loaded, HuggingFaceRun(f"{root}/best", **options)).wait())
    found["best"] = there("best")
    run("last", arguments={"save_total_limit": 2})
    found["last"] = there("last")

    shutil.copytree(f"{root}/whole", f"{root}/path")
    found["path"] = run("path", resume=f"{root}/path/checkpoint-3")
    (data, *_) = Path(root, "whole/checkpoint-9").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    found["damaged"] = run("whole", resume=True)
    shutil.rmtree(f"{root}/path/checkpoint-9")
    Path(root, "path/checkpoint-12").mkdir()
    found["never committed"] = run("path", resume=f"{root}/path/checkpoint-12")

    stopped = HuggingFaceRun(f"{root}/stopped", steps=1000, sigterm_at=5)
    found["stopped"] = [ran(ending)[-1][0] for ending in run_groups([Group(2, stopped.run)])[0]]
    found["saved at SIGTERM"] = there("stopped")

    weights = f"{root}/whole/checkpoint-12"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=weights, user_metadata={"partial": ["model"]})
    found["weights alone"] = run("whole", resume=True)[: len(found["whole"])]
    shutil.copytree(f"{root}/whole/checkpoint-9", f"{root}/anew/checkpoint-30")
    run("anew", arguments={"save_total_limit": 2})
    found["anew"] = there("anew")
    run("own", trainer=Trainer)
    shutil.rmtree(f"{root}/own/checkpoint-9")
    found["own"] = run("own", resume=True)
    run("weights", arguments={"save_only_model": True})
    found["weights"] = run("weights", steps=12, resume=True)
    ending = Child(HuggingFaceRun(f"{root}/nothing", resume=True).run).wait()
    found["nothing"] = None if ending.raised is None else (ending.raised.type_name, ending.raised.message)
    return found


@pytest.mark.exhaustive
def test_arguments_of_the_trainer_keep_their_meaning(tmp_path: Path) -> None:
    """The Trainer's limits, best model and resume arguments work, also over damaged, weights-only, missing
    and the Trainer's own checkpoints, and with SIGTERM on one rank. Another run's checkpoints are deleted."""
    found = in_lab(arguments_of_the_trainer, str(tmp_path))
    assert found["best"] == ["checkpoint-3", "checkpoint-9"]
    best, loaded = found["best loss"]
    assert loaded == best
    assert found["last"] == found["anew"] == ["checkpoint-6", "checkpoint-9"]
    for how in ("path", "damaged", "never committed", "weights alone", "own"):
        assert found[how] == found["whole"], how
    assert len({*found["stopped"]}) == 1
    # the ranks may agree on a later step
    assert found["saved at SIGTERM"][-1] in ("checkpoint-5", "checkpoint-6", "checkpoint-7")
    assert [step for step, _ in found["weights"]] == [2, 4, 6, 8, 10, 12]
    name, message = found["nothing"]
    assert name == "ValueError"
    assert "No valid checkpoint found in output directory" in message


class Moments:
    """Registered object with tensors sharded like the model, and a plain value."""

    def __init__(self, model: Any) -> None:
        self.average = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """Return tensors sharded like the model, and the count."""
        return {"average": self.average, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all values."""
        self.average, self.count = state["average"], state["count"]


def folders_of_accelerate(rank: int, world_size: int, root: str) -> bool:
    """Save to an explicit folder twice, load from a missing folder, and load Accelerate's own checkpoint."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    import dcp.integrations.accelerate
    from tests.support.trainer_runs import fsdp_on_cpu

    with fsdp_on_cpu():
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(4, 4)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    moments = Moments(model)
    accelerator.register_for_checkpointing(moments)
    own_save = accelerator.save_state
    checkpoints = dcp.integrations.accelerate.use(accelerator)

    for count in (1, 2):
        moments.count = count
        moments.average["weight"].fill_(count)
        accelerator.save_state(f"{root}/again")
    checkpoints.wait()
    moments.count = 0
    moments.average["weight"].fill_(0)
    accelerator.load_state(f"{root}/again")
    assert moments.count == 2
    assert torch.all(moments.average["weight"].full_tensor() == 2)

    with pytest.raises(ValueError, match="folder does not exist"):
        accelerator.load_state(f"{root}/nowhere")
    accelerator._custom_objects.clear()  # Accelerate's own save does not support sharded objects
    own_save(f"{root}/own")
    weight = model.state_dict()["weight"].full_tensor().clone()
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(f"{root}/own")
    assert torch.equal(model.state_dict()["weight"].full_tensor(), weight)
    accelerator.end_training()
    return True


def run_folders_of_accelerate(root: str) -> list[Any]:
    """Run `folders_of_accelerate` on two ranks."""
    return [ran(ending) for ending in run_groups([Group(2, folders_of_accelerate, (root,))])[0]]


@pytest.mark.exhaustive
def test_folders_of_accelerate(tmp_path: Path) -> None:
    """A folder is overwritten, sharded objects are loaded whole, and Accelerate's own checkpoints load."""
    assert in_lab(run_folders_of_accelerate, str(tmp_path)) == [True, True]


def loops_of_accelerate(root: str) -> dict[str, Any]:
    """Run loops with a damaged newest checkpoint, without a checkpoint, and with a stateful loader."""
    from tests.support.trainer_runs import LoopRun

    def run(folder: str, **options: Any) -> Ending:
        return Child(LoopRun(f"{root}/{folder}", **options).run).wait()

    found = {"whole": ran(run("loop")), "stateful": ran(run("stateful", stateful_loader=True))}
    (data, *_) = Path(root, "loop/checkpoints/checkpoint_2").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    shutil.rmtree(f"{root}/stateful/checkpoints/checkpoint_2")
    found["damaged"] = ran(run("loop", resume=True))
    found["stateful, resumed"] = ran(run("stateful", stateful_loader=True, resume=True))
    found["last batch"] = ran(run("batch", stateful_loader=True, every=5, steps=18))
    for number in (2, 3):
        shutil.rmtree(f"{root}/batch/checkpoints/checkpoint_{number}", ignore_errors=True)
    found["last batch, resumed"] = ran(run("batch", stateful_loader=True, every=5, steps=18, resume=True))
    nothing = run("nothing", resume=True)
    found["nothing"] = None if nothing.raised is None else nothing.raised.type_name
    return found


@pytest.mark.exhaustive
def test_loops_of_accelerate(tmp_path: Path) -> None:
    """The checkpoint before a damaged one is loaded, and the damaged one overwritten. A stateful loader
    resumes at its batch, within an epoch and at the last batch. Without a checkpoint a load is an error."""
    found = in_lab(loops_of_accelerate, str(tmp_path))
    assert found["damaged"] == found["whole"]
    assert found["stateful, resumed"] == found["stateful"]
    assert found["last batch, resumed"] == found["last batch"]
    assert found["nothing"] == "CheckpointNotFoundError"

"""Trainer and Accelerate, the real ones: killed in a save, resumed, compared with runs that were not."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from tests.support.crashes import Child, Ending, Group, in_lab, run_groups


def ran(ending: Ending) -> Any:
    """What a process returned."""
    assert ending.raised is None, ending.raised.traceback_text
    assert not ending.hung and not ending.signal
    return ending.value


def killed_and_resumed(root: str, *kinds: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """In the laboratory, for each kind of run: two ranks to the end; two that die in their second save; what
    goes on from that on two ranks, and on one."""
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
    for dying in begun[1::2]:  # of two ranks one may get to know that the other is gone
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
    "options",
    [
        pytest.param({"fsdp": True}, id="fsdp"),
        pytest.param({}, id="ddp", marks=pytest.mark.exhaustive),
        pytest.param({"fsdp": True, "peft": True}, id="fsdp-peft", marks=pytest.mark.exhaustive),
        pytest.param({"peft": True}, id="ddp-peft", marks=pytest.mark.exhaustive),
    ],
)
def test_killed_in_a_save_and_resumed(tmp_path: Path, options: dict[str, Any]) -> None:
    """On as many ranks each loss is bit for bit the uninterrupted run's; on one rank, where nothing is
    sharded, training goes on."""
    tied = {"tied": "fsdp" not in options}
    trainer, loop = in_lab(killed_and_resumed, str(tmp_path), ("trainer", options | tied), ("loop", options))
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
    """The best loss of a run, and that of the model which it has at the end."""
    trainer = run.make()
    trainer.train()
    return trainer.state.best_metric, trainer.evaluate()["eval_loss"]


def arguments_of_the_trainer(root: str) -> dict[str, Any]:
    """In the laboratory, alone: limits, the best, paths, checkpoints of the Trainer's own, damage."""
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
    """Limits with and without the best, a path, True over a damaged one and over weights alone, SIGTERM on
    one rank, another run's checkpoints, which go, the Trainer's own, weights alone, nothing at all."""
    found = in_lab(arguments_of_the_trainer, str(tmp_path))
    assert found["best"] == ["checkpoint-3", "checkpoint-9"]
    best, loaded = found["best loss"]
    assert loaded == best
    assert found["last"] == found["anew"] == ["checkpoint-6", "checkpoint-9"]
    for how in ("path", "damaged", "never committed", "weights alone", "own"):
        assert found[how] == found["whole"], how
    assert len({*found["stopped"]}) == 1
    # the ranks may agree a step later
    assert found["saved at SIGTERM"][-1] in ("checkpoint-5", "checkpoint-6", "checkpoint-7")
    assert [step for step, _ in found["weights"]] == [2, 4, 6, 8, 10, 12]
    name, message = found["nothing"]
    assert name == "ValueError"
    assert "No valid checkpoint found in output directory" in message


def refusals(root: str) -> None:
    """In the laboratory: wrong uses, each with the way out that its error names."""
    import accelerate
    from accelerate import Accelerator
    from transformers import Trainer

    from dcp.integrations.accelerate import use
    from dcp.integrations.huggingface import DcpTrainerMixin
    from tests.support.trainer_runs import HuggingFaceRun

    class _ToTheHub(Trainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.args.push_to_hub, self.args.hub_strategy = True, "every_save"

    class _WithDeepSpeed(Trainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.is_deepspeed_enabled = True

    def refused(way_out: str, call: Any) -> None:
        with pytest.raises((ValueError, dcp.errors.OptionError), match=re.escape(way_out)):
            call()

    arguments = {"save_on_each_node": "one output_dir", "enable_jit_checkpoint": "enable_jit_checkpoint off"}
    for argument, way_out in arguments.items():
        refused(way_out, HuggingFaceRun(root, arguments={argument: True}).make)
    trainers: dict[str, Any] = {"set hub_strategy='end'": _ToTheHub, "or FSDP2": _WithDeepSpeed}
    for way_out, trainer in trainers.items():
        made = type("Own", (DcpTrainerMixin, trainer), {})
        refused(way_out, HuggingFaceRun(root, trainer=made).make)
    accelerator = Accelerator(cpu=True)
    refused("'thread', 'process' or 'sync'", lambda: use(accelerator, mode="proces"))
    project = accelerate.utils.ProjectConfiguration(root, automatic_checkpoint_naming=True)
    naming = Accelerator(cpu=True, project_config=project)
    refused("verify_saved must be one of", lambda: use(naming, verify_saved="all"))
    refused("automatic_checkpoint_naming=True", lambda: use(accelerator, catalog="http://127.0.0.1:1"))
    for kind in ("DEEPSPEED", "MEGATRON_LM"):
        accelerator.state.distributed_type = accelerate.DistributedType[kind]
        refused("use DDP or FSDP2", lambda: use(accelerator))
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=1)
    refused("fsdp_version=2", lambda: use(accelerator))


@pytest.mark.exhaustive
def test_wrong_use_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    """Engines and arguments that need the frameworks' own files, each with a way out."""
    in_lab(refusals, str(tmp_path))


class Moments:
    """A registered object with what is sharded as the model is, and what is not."""

    def __init__(self, model: Any) -> None:
        self.average = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """Tensors of the model's kind."""
        return {"average": self.average, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """All of it."""
        self.average, self.count = state["average"], state["count"]


def folders_of_accelerate(rank: int, world_size: int, root: str) -> list[str]:
    """Explicit folders: saved over, told apart, not there; Accelerate's own; two models, one optimizer."""
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

    errors = []
    if rank == 0:
        Path(root, "killed").mkdir()
    accelerator.wait_for_everyone()
    for place in ("killed", "nowhere"):
        with pytest.raises(Exception, match=r"\w") as caught:
            accelerator.load_state(f"{root}/{place}")
        errors.append(f"{type(caught.value).__name__}: {caught.value}")
    accelerator._custom_objects.clear()  # Accelerate's own way does not know what is sharded
    own_save(f"{root}/own")
    weight = model.state_dict()["weight"].full_tensor().clone()
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(f"{root}/own")
    assert torch.equal(model.state_dict()["weight"].full_tensor(), weight)
    accelerator.end_training()
    return errors


def run_folders_of_accelerate(root: str) -> list[Any]:
    """In the laboratory."""
    return [ran(ending) for ending in run_groups([Group(2, folders_of_accelerate, (root,))])[0]]


@pytest.mark.exhaustive
def test_folders_of_accelerate(tmp_path: Path) -> None:
    """A folder is saved over; sharded objects come back whole; a save that was killed names what is beside
    it; Accelerate's own checkpoints load."""
    for killed, nowhere in in_lab(run_folders_of_accelerate, str(tmp_path)):
        assert "no save there has ended; the newest beside it is" in killed
        assert f"{tmp_path}/again" in killed
        assert nowhere == f"ValueError: Tried to find {tmp_path}/nowhere but folder does not exist"


def loops_of_accelerate(root: str) -> dict[str, Any]:
    """In the laboratory: the newest is damaged; there is none; the loader has a state of its own."""
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
    """Over a damaged checkpoint the one before is taken, and saved over; a stateful loader goes on where it
    was, within an epoch and at its last batch; where there is none it is an error."""
    found = in_lab(loops_of_accelerate, str(tmp_path))
    assert found["damaged"] == found["whole"]
    assert found["stateful, resumed"] == found["stateful"]
    assert found["last batch, resumed"] == found["last batch"]
    assert found["nothing"] == "CheckpointNotFoundError"


class Stubborn:
    """A registered object that has no state on one rank."""

    def __init__(self, rank: int, odd: int) -> None:
        self.is_odd = rank == odd
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """Of the others."""
        if self.is_odd:
            raise ValueError("no state here")
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of the others."""
        self.count = state["count"]


def one_rank_has_no_state(rank: int, world_size: int, root: str) -> list[str]:
    """Accelerate in a folder and with automatic naming, saved and loaded. What each says."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    import dcp.integrations.accelerate
    from tests.support.trainer_runs import fsdp_on_cpu

    def said(act: Any) -> str:
        try:
            act()
        except (dcp.CheckpointError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "fine"

    found = []
    for named in (False, True):
        with fsdp_on_cpu(False):
            project = ProjectConfiguration(f"{root}/{named}", automatic_checkpoint_naming=named)
            accelerator = Accelerator(cpu=True, project_config=project)
        checkpoints = dcp.integrations.accelerate.use(accelerator)
        accelerator.prepare(torch.nn.Linear(2, 2))
        stubborn = Stubborn(rank, 1)
        accelerator.register_for_checkpointing(stubborn)
        place = None if named else f"{root}/folder"

        def saved(accelerator: Any = accelerator, place: Any = place, waits: Any = checkpoints) -> None:
            accelerator.save_state(place)
            waits.wait()

        found.append(said(saved))
        said(checkpoints.wait)  # of the rank that has raised, whose save has failed as well
        stubborn.is_odd = False
        found.append(said(saved))
        stubborn.is_odd = rank == 1
        found.append(said(lambda accelerator=accelerator, place=place: accelerator.load_state(place)))
        stubborn.is_odd = False
        accelerator.load_state(place)
        checkpoints.wait()
    return found


def _one_rank_has_no_state(root: str) -> list[Any]:
    return [ran(ending) for ending in run_groups([Group(2, one_rank_has_no_state, (root,))])[0]]


@pytest.mark.exhaustive
def test_what_one_rank_cannot_give_fails_all(tmp_path: Path) -> None:
    """Nobody waits for it until a timeout: saves and loads of Accelerate, which work again after it; the
    others name the rank."""
    first, second = in_lab(_one_rank_has_no_state, str(tmp_path))
    own = "ValueError: no state here"
    assert second == [own, "fine", own] * 2
    assert first[1] == first[4] == "fine"
    assert all("no state here" in first[at] and "rank 1" in first[at] for at in (0, 2, 3, 5))

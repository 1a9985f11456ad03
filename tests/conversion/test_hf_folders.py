"""Hugging Face folders: `from_pretrained` loads them, and only allowed files of a template are copied."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import dcp
from dcp.errors import OptionError, PlanError
from tests.support.programs import run_program

_WORDS = ["<unk>", "<s>", "</s>", "who", "reads", "this", "?", "user", ":"]
_TEXT = "who reads this ?"
_WEIGHTS = "model.safetensors"


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _paths(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _beside(folder: Path) -> set[str]:
    """Return the names of a template's files other than weights."""
    return {name for name in _names(folder) if not name.startswith("model")}


def _model(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # slow import: not while tests are collected

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(_WORDS),
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tokens = Tokenizer(WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="<unk>"))
    tokens.pre_tokenizer = Whitespace()
    make: Any = PreTrainedTokenizerFast
    made = make(tokenizer_object=tokens, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.chat_template = "{% for message in messages %}user : {{ message['content'] }}{% endfor %}"
    return made


def _loaded(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(torch.arange(6).view(1, 6)).logits
    assert isinstance(found, torch.Tensor)
    return found


def _assert_same_model(found: Any, expected: Any) -> None:
    tensors, wanted = found.state_dict(), expected.state_dict()
    assert list(tensors) == list(wanted)
    for name, tensor in wanted.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name
    assert torch.equal(_logits(found), _logits(expected))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the model before training, with generation settings, a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("template")
    model = _model(seed=1)
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a step of a training, nested as trainers do."""
    folder = tmp_path_factory.mktemp("run") / "step-7"
    dcp.save({"model": _model(seed=2).state_dict(), "step": 7}, checkpoint_id=folder, no_dist=True)
    return folder


_OF_MODEL: dict[str, Any] = {
    "to": "safetensors",
    "only": "model",
    "rename": {r"^model\.": ""},
    "executor": "inline",
}


@pytest.mark.parametrize("shard_bytes", [None, 4000])
def test_from_pretrained_loads_the_model(
    template: Path, checkpoint: Path, tmp_path: Path, shard_bytes: int | None
) -> None:
    """`from_pretrained` of the folder, one file or shards with an index, has each tensor, the outputs, the
    tokenizer, the chat template and the generation settings."""
    from transformers import AutoTokenizer

    dcp.convert(checkpoint, tmp_path / "hf", **_OF_MODEL, hf=template, shard_bytes=shard_bytes)
    found = _loaded(tmp_path / "hf")
    _assert_same_model(found, _model(seed=2))
    assert found.generation_config.max_new_tokens == 5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer(_TEXT)["input_ids"] == [_WORDS.index(word) for word in _TEXT.split()]
    chat = [{"role": "user", "content": _TEXT}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == f"user : {_TEXT}"
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert (len(shards) > 1) == (tmp_path / "hf" / "model.safetensors.index.json").exists()
    assert (len(shards) > 1) == (shard_bytes is not None)
    for shard in shards:
        with safe_open(shard, "pt") as file:
            assert file.metadata()["format"] == "pt"
    for name in _beside(template):
        assert (tmp_path / "hf" / name).read_bytes() == (template / name).read_bytes(), name


def _adapted(base: Any) -> Any:
    from peft import LoraConfig, get_peft_model  # slow import: not while tests are collected

    torch.manual_seed(5)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model.eval()


@pytest.mark.parametrize("is_whole_state", [False, True])
def test_from_pretrained_loads_the_adapter(tmp_path: Path, is_whole_state: bool) -> None:
    """`PeftModel.from_pretrained` has each tensor and computes the same, from PEFT's own state dict and from
    the selected part of a whole training state."""
    from peft import PeftModel, get_peft_model_state_dict

    model = _adapted(_model())
    model.save_pretrained(tmp_path / "template")
    (tmp_path / "template" / "adapter_model.safetensors").unlink()
    state = model.state_dict() if is_whole_state else get_peft_model_state_dict(model)
    dcp.save(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    chosen: dict[str, Any] = {"only": "*.lora_*", "rename": {r"\.default\.": "."}} if is_whole_state else {}
    made = tmp_path / "adapter"
    report = dcp.convert(
        tmp_path / "step-1", made, to="safetensors", hf=tmp_path / "template", executor="inline", **chosen
    )
    assert set(report.files) == {"adapter_model.safetensors", "adapter_config.json"}
    found = PeftModel.from_pretrained(_model(), made).eval()
    expected = get_peft_model_state_dict(model)
    for name, tensor in get_peft_model_state_dict(found).items():
        assert torch.equal(tensor, expected.pop(name)), name
    assert not expected
    assert torch.equal(_logits(found), _logits(model))
    assert not torch.equal(_logits(found), _logits(_model()))
    state = {name: torch.zeros_like(tensor) for name, tensor in get_peft_model_state_dict(model).items()}
    assert not dcp.load(state, checkpoint_id=made, no_dist=True).unexpected  # dcp can load the folder


def test_the_config_has_the_dtype_of_the_weights(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """config.json gets the dtype of the weights; `from_pretrained` would otherwise use the template's."""
    dcp.convert(checkpoint, tmp_path / "hf", **_OF_MODEL, hf=template, dtype="bfloat16")
    found = _loaded(tmp_path / "hf")
    _assert_same_model(found, _model(seed=2).bfloat16())
    before = json.loads((template / "config.json").read_text())
    after = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {key for key in before | after if before.get(key) != after.get(key)} == {"dtype"}


def test_names_that_no_model_reads_are_refused(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A conversion is refused if no tensor has a name of the template: `from_pretrained` would ignore the
    tensors and initialise the model at random."""
    with pytest.raises(PlanError, match=r"no tensor has a name of the template .*: 'model\.model\.embed"):
        dcp.convert(
            checkpoint, tmp_path / "hf", to="safetensors", only="model", executor="inline", hf=template
        )
    assert not _names(tmp_path)


def _hostile(folder: Path, template: Path) -> Path:
    """Make a template with files that must not be copied, and a link to a secret under a known name."""
    shutil.copytree(template, folder)
    secret = folder.parent / "secret"
    secret.write_text("secret")
    for name in ("vocab.txt", "tokenizer.json", "notes.txt"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
    (folder / "merges.txt").symlink_to("config.json")
    (folder / "dict.txt").symlink_to("dict.txt")
    evil = ("modeling_evil.py", "pytorch_model.bin", "manifest.msgpack", ".metadata", "training_args.bin")
    for name in evil:
        (folder / name).write_text("evil")
    os.mkfifo(folder / "vocab.json")
    return folder


def test_only_known_template_files_are_copied(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """No code, weights, checkpoint commits, or targets of links outside of the template are copied; links
    within are read. hf_also= copies further files, but never weights and links to the outside."""
    folder = _hostile(tmp_path / "template", template)
    dcp.convert(checkpoint, tmp_path / "hf", **_OF_MODEL, hf=folder)
    usual = {_WEIGHTS, "merges.txt", *_beside(template)} - {"tokenizer.json"}
    assert _names(tmp_path / "hf") == usual
    assert (tmp_path / "hf" / "merges.txt").read_bytes() == (template / "config.json").read_bytes()
    dcp.convert(checkpoint, tmp_path / "more", **_OF_MODEL, hf=folder, hf_also=("*.py", "*"))
    assert _names(tmp_path / "more") == {*usual, "modeling_evil.py"}
    assert all("secret" not in path.read_text("latin1") for path in (tmp_path / "more").iterdir())


_BELOW = {
    "additional_chat_templates/tool_use.jinja": "tools",
    "question_encoder_tokenizer/tokenizer_config.json": "{}",
    "question_encoder_tokenizer/vocab.txt": "who",
}
"""Files in sub-folders of a template that from_pretrained reads."""

_NOT_BELOW = (
    "additional_chat_templates/evil.py",
    "question_encoder_tokenizer/notes.md",
    *("checkpoint-500/config.json", "checkpoint-500/tokenizer.json", "checkpoint-500/model.safetensors"),
    *("checkpoint-600/tokenizer.json", "checkpoint-600/pytorch_model.bin"),
    *("onnx/config.json", "onnx/model.onnx", "onnx/model.onnx_data", "onnx/tokenizer.json"),
    *("code/__init__.py", "code/parts.py", ".cache/tokenizer.json", "__pycache__/vocab.txt"),
    *("deep/er/tokenizer.json", "weights.gguf"),
)


def _with_folders(folder: Path, template: Path) -> Path:
    """Make a template with sub-folders of models, trainers and exports, and links to the outside."""
    shutil.copytree(template, folder)
    for path, text in {**_BELOW, **dict.fromkeys(_NOT_BELOW, "evil")}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "tokenizer.json").write_text("secret")
    (folder / "linked").symlink_to(outside)
    (folder / "question_encoder_tokenizer" / "merges.txt").symlink_to(outside / "tokenizer.json")
    return folder


def test_subfolders_of_a_template(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Sub-folders of chat templates and tokenizers are copied, files of trainers, exports and links are not.
    hf_also= copies code by a glob, but neither weights of other formats nor those of another model."""
    folder = _with_folders(tmp_path / "template", template)
    usual = {_WEIGHTS, *_BELOW, *_beside(template)}
    dcp.convert(checkpoint, tmp_path / "hf", **_OF_MODEL, hf=folder)
    assert _paths(tmp_path / "hf") == usual
    assert {path: (tmp_path / "hf" / path).read_text() for path in _BELOW} == _BELOW
    dcp.convert(checkpoint, tmp_path / "code", **_OF_MODEL, hf=folder, hf_also=["*.py"])
    code = {"additional_chat_templates/evil.py", "code/__init__.py", "code/parts.py"}
    assert _paths(tmp_path / "code") == usual | code
    asked = ["*", "onnx/*", "weights.gguf"]
    dcp.convert(checkpoint, tmp_path / "all", **_OF_MODEL, hf=folder, hf_also=asked)
    found = _paths(tmp_path / "all")
    assert {"onnx/config.json", "onnx/tokenizer.json", "weights.gguf"} <= found
    assert not [path for path in found if path.startswith(("checkpoint-", "linked/", "deep/", "onnx/m"))]
    assert not [path for path in found if b"secret" in (tmp_path / "all" / path).read_bytes()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "dcp"}, "hf requires to='safetensors' and a folder"),
        ({"to": "safetensors", "target": "model.safetensors"}, "a folder as target, not a file"),
        ({"to": "safetensors", "hf": "nowhere/at/all"}, "is neither a folder nor the name of a model"),
    ],
)
def test_invalid_options_are_refused(
    template: Path, checkpoint: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """Each combination raises its own error."""
    options = {"hf": template, "target": "folder", **options}
    with pytest.raises(OptionError, match=message):
        dcp.convert(checkpoint, tmp_path / options.pop("target"), **options)


def test_a_model_replaces_an_old_adapter(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A model replaces an adapter: `from_pretrained` reads no old file; unrelated files stay."""
    target = tmp_path / "hf"
    _adapted(_model()).save_pretrained(target)
    (target / "README.md").write_text("mine")
    (target / "vocab.txt").write_text("of another tokenizer")
    dcp.convert(checkpoint, target, **_OF_MODEL, hf=template, overwrite=True)
    _assert_same_model(_loaded(target), _model(seed=2))
    assert (target / "README.md").read_text() == "mine"
    assert not {"adapter_config.json", "adapter_model.safetensors", "vocab.txt"} & _names(target)
    assert (target / "config.json").read_bytes() == (template / "config.json").read_bytes()


def _hub_cache(folder: Path, template: Path) -> Path:
    """Make a cache of the hub with one model: links to files that are named by their hash."""
    repository = folder / "models--somebody--small"
    snapshot = repository / "snapshots" / ("a" * 40)
    for made in (repository / "refs", repository / "blobs", snapshot):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    for number, path in enumerate(sorted(template.iterdir())):
        if path.suffix != ".safetensors":
            shutil.copy(path, repository / "blobs" / str(number))
            (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "vocab.txt").symlink_to(template / "config.json")
    return snapshot


@pytest.mark.exhaustive
def test_a_template_in_the_hub_cache(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A model is found by its name in the cache, without a network."""
    _hub_cache(tmp_path / "cache", template)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    arguments = ["convert", checkpoint, tmp_path / "hf", "--to", "safetensors", "--only", "model"]
    arguments += ["--rename", r"^model\.=>", "--hf", "somebody/small", "--executor", "inline"]
    done = run_program("-m", "dcp", *map(str, arguments), env=environment)
    assert done.returncode == 0, done.stderr
    _assert_same_model(_loaded(tmp_path / "hf"), _model(seed=2))
    arguments[arguments.index("somebody/small")] = "somebody/large"
    arguments[2] = tmp_path / "other"
    done = run_program("-m", "dcp", *map(str, arguments), env=environment)
    assert (
        done.returncode == 3
        and "neither a folder somebody/large nor a model of this name on the hub" in done.stderr
    )
    assert not (tmp_path / "other").exists()

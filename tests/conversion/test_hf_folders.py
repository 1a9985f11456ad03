"""Whole folders of Hugging Face: what `from_pretrained` makes of them, what a template may bring there."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import dcp
from dcp.errors import CheckpointFormatError, OptionError, PlanError
from tests.support.conversion import command
from tests.support.crashes import in_lab
from tests.support.programs import run_program

_WORDS = ["<unk>", "<s>", "</s>", "who", "reads", "this", "?", "user", ":"]
_TEXT = "who reads this ?"
_WEIGHTS = "model.safetensors"


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _paths(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _beside(folder: Path) -> set[str]:
    """Of a template all that is no weights."""
    return {name for name in _names(folder) if not name.startswith("model")}


def _model(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds of each process that collects tests

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
    ours, theirs = found.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    assert torch.equal(_logits(found), _logits(expected))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the training began with: model, generation settings, tokenizer and its chat template."""
    folder = tmp_path_factory.mktemp("template")
    model = _model(seed=1)
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of a training, as trainers nest it."""
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
def test_a_model_is_what_was_trained(
    template: Path, checkpoint: Path, tmp_path: Path, shard_bytes: int | None
) -> None:
    """`from_pretrained` of the folder: each tensor, the outputs, the tokenizer and its chat template, the
    settings of generation; in one file, and in shards with an index."""
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


def test_through_a_map_and_back(template: Path, tmp_path: Path) -> None:
    """What has torchtitan's names; the configuration of the template has the sizes that the map needs."""
    trained = _model(seed=3)
    trained.save_pretrained(tmp_path / "trained")
    titan = tmp_path / "titan"
    dcp.convert(tmp_path / "trained", titan, to="dcp", map="llama:hf-to-titan", executor="inline")
    shown = command(
        *("convert", titan, tmp_path / "hf", "--to", "safetensors", "--map", "llama:hf-to-titan"),
        *("--inverse", "--hf", template, "--executor", "inline"),
    )
    assert shown.status == 0, shown.err
    _assert_same_model(_loaded(tmp_path / "hf"), trained)


def _adapted(base: Any) -> Any:
    from peft import LoraConfig, get_peft_model  # seconds of each process that collects tests

    torch.manual_seed(5)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model.eval()


@pytest.mark.parametrize("is_whole_state", [False, True])
def test_an_adapter_is_what_was_trained(tmp_path: Path, is_whole_state: bool) -> None:
    """Of PEFT's own state dict, and chosen from that of the whole training: `PeftModel.from_pretrained` has
    each tensor of it, and computes alike."""
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
    assert not dcp.load(state, checkpoint_id=made, no_dist=True).unexpected  # a checkpoint as any other


def test_an_adapter_s_names_are_peft_s(tmp_path: Path) -> None:
    """Those of the training have the adapter's own in them, by which `PeftModel.from_pretrained` would find
    none of them; others are the base model's."""
    _adapted(_model()).save_pretrained(tmp_path / "template")
    (tmp_path / "template" / "adapter_model.safetensors").unlink()
    dcp.save(_adapted(_model()).state_dict(), checkpoint_id=tmp_path / "step-1", no_dist=True)
    given: dict[str, Any] = {"to": "safetensors", "hf": tmp_path / "template", "executor": "inline"}
    for chosen in ({"only": "*.lora_*"}, {"rename": {r"\.default\.": ".", "^base_model": "base"}}):
        with pytest.raises(PlanError, match=r"are not called as an adapter's"):
            dcp.convert(tmp_path / "step-1", tmp_path / "adapter", **given, **chosen)
    assert not (tmp_path / "adapter").exists()


def test_the_configuration_says_the_dtype_of_the_weights(
    template: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Otherwise `from_pretrained` would make the model in the template's."""
    dcp.convert(checkpoint, tmp_path / "hf", **_OF_MODEL, hf=template, dtype="bfloat16")
    found = _loaded(tmp_path / "hf")
    _assert_same_model(found, _model(seed=2).bfloat16())
    before = json.loads((template / "config.json").read_text())
    after = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {key for key in before | after if before.get(key) != after.get(key)} == {"dtype"}


def test_names_that_nobody_would_read_are_refused(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Of tensors that are called otherwise than all of the template's: `from_pretrained` would pass over
    them, and make the weights up."""
    with pytest.raises(PlanError, match=r"no tensor is called as those of .* are: 'model\.model\.embed"):
        dcp.convert(
            checkpoint, tmp_path / "hf", to="safetensors", only="model", executor="inline", hf=template
        )
    assert not _names(tmp_path)


def _hostile(folder: Path, template: Path) -> Path:
    """A template with what must not get into anybody's folder, and a link to a secret under a known name."""
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


def test_a_stranger_s_template_gives_known_files_alone(
    template: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """No code, no weights, no commits of checkpoints, nothing that a link leads to outside of it; links
    within are read. Further files come when they are asked for, weights and links never."""
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
"""Of folders of a template, what from_pretrained reads."""

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
    """What models, their trainers and their export leave in a folder, and links out of it."""
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


def test_folders_of_a_template(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Chat templates and tokenizers of their own are copied; what a trainer, an export or a link has there is
    not. Asked for is code by its glob, but neither weights of other formats nor those of another model."""
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


def test_folders_of_what_stood_there_before(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Of a folder that is replaced nothing that from_pretrained would read stays, also below."""
    target, newer = tmp_path / "hf", tmp_path / "newer"
    dcp.convert(checkpoint, target, **_OF_MODEL, hf=_with_folders(tmp_path / "template", template))
    shutil.copytree(template, newer)
    (newer / "additional_chat_templates").mkdir()
    (newer / "additional_chat_templates" / "rag.jinja").write_text("rag")
    dcp.convert(checkpoint, target, **_OF_MODEL, hf=newer, overwrite=True)
    assert {path for path in _paths(target) if "/" in path} == {"additional_chat_templates/rag.jinja"}


def test_a_folder_that_is_replaced_has_others_in_it(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """They would have to be moved: an error, and all is as it was."""
    target = tmp_path / "hf"
    dcp.convert(checkpoint, target, **_OF_MODEL, hf=_with_folders(tmp_path / "template", template))
    (target / "additional_chat_templates" / "notes.md").write_text("mine")
    before = _paths(target)
    with pytest.raises(PlanError, match="additional_chat_templates is in the folder to be replaced"):
        dcp.convert(checkpoint, target, **_OF_MODEL, hf=template, overwrite=True)
    assert _paths(target) == before


_MODELING = """
import transformers

from .helping import scaled


class OwnConfig(transformers.LlamaConfig):
    model_type = "own"


class OwnModel(transformers.LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = scaled(found.logits)
        return found
"""


def _with_code(folder: Path, template: Path) -> Path:
    """A model whose class is in its folder, as many of the hub have it."""
    shutil.copytree(template, folder)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    config |= {"model_type": "own", "architectures": ["OwnModel"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(_MODELING)
    (folder / "helping.py").write_text("def scaled(tensor):\n    return tensor * 3\n")
    return folder


def _computed(folder: str, modules: str) -> tuple[str, Any]:
    """What a model with code of its own computes, which is imported from ``modules``."""
    import transformers.dynamic_module_utils as dynamic

    vars(dynamic)["HF_MODULES_CACHE"] = modules
    made = _loaded(Path(folder), trust_remote_code=True)
    return type(made).__name__, _logits(made.eval()).tolist()


def test_a_model_with_code_of_its_own(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Its code comes where it is asked for, and computes what it computes with the template's."""
    folder = _with_code(tmp_path / "template", template)
    dcp.convert(checkpoint, tmp_path / "hf", **_OF_MODEL, hf=folder, hf_also=["*.py"], shard_bytes=4000)
    name, logits = in_lab(_computed, str(tmp_path / "hf"), str(tmp_path / "modules"))
    assert name == "OwnModel" and torch.equal(torch.tensor(logits), 3 * _logits(_model(seed=2)))
    dcp.convert(checkpoint, tmp_path / "plain", **_OF_MODEL, hf=folder)
    assert not list((tmp_path / "plain").glob("*.py"))


def _with_huge_files(folder: Path, size_bytes: int, *names: str) -> None:
    for name in names:
        with (folder / name).open("wb") as file:
            file.truncate(size_bytes)


_MANY = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model")


@pytest.mark.parametrize(
    ("spoil", "error", "told"),
    [
        (
            lambda it: (it / "config.json").unlink(),
            OptionError,
            "neither config.json nor adapter_config.json",
        ),
        (lambda it: (it / "config.json").write_text("[" * 100_000), CheckpointFormatError, "no JSON object"),
        (
            lambda it: _with_huge_files(it, 65 << 20, "tokenizer.json"),
            OptionError,
            r"tokenizer\.json of it are",
        ),
        (lambda it: _with_huge_files(it, 60 << 20, *_MANY), OptionError, r"\d+ bytes are beside its weights"),
    ],
)
def test_a_template_that_is_none(
    template: Path, checkpoint: Path, tmp_path: Path, spoil: Any, error: type[Exception], told: str
) -> None:
    """An error that says why, before anything is written."""
    folder = tmp_path / "template"
    shutil.copytree(template, folder)
    spoil(folder)
    with pytest.raises(error, match=told):
        dcp.convert(checkpoint, tmp_path / "hf", **_OF_MODEL, hf=folder)
    assert _names(tmp_path) == {"template"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"to": "dcp"}, "hf is for a folder of safetensors"),
        ({"to": "safetensors", "target": "model.safetensors"}, "no name of a file"),
        ({"to": "safetensors", "hf": None, "hf_also": ["*.py"]}, "hf_also is about hf"),
        ({"to": "safetensors", "hf_also": ["*.pie"]}, r"'\*\.pie' match no file"),
        ({"to": "safetensors", "hf": "nowhere/at/all"}, "is no folder, and no name of a model"),
    ],
)
def test_options_that_cannot_be_meant(
    template: Path, checkpoint: Path, tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    """Each with an error of its own."""
    options = {"hf": template, "target": "folder", **options}
    with pytest.raises(OptionError, match=told):
        dcp.convert(checkpoint, tmp_path / options.pop("target"), **options)


def test_what_stood_in_the_folder_before(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A model in place of an adapter: nothing of the old one misleads `from_pretrained`; what is nobody's
    stays."""
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
    """A cache of the hub with one model, as it is on disk: links to files that are called by their hash."""
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


def test_a_folder_of_the_hub_s_cache(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """What is linked within the model's part of the cache is copied, and no link that leads out of it."""
    snapshot = _hub_cache(tmp_path / "cache", template)
    dcp.convert(checkpoint, tmp_path / "hf", **_OF_MODEL, hf=snapshot)
    assert _names(tmp_path / "hf") == {_WEIGHTS, *_beside(template)}


@pytest.mark.exhaustive
def test_a_model_of_the_hub(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """By its name, from the cache, without a network."""
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
    assert done.returncode == 3 and "no folder somebody/large, nor does the hub" in done.stderr
    assert not (tmp_path / "other").exists()


def _without_the_hub(checkpoint: str, target: str) -> str:
    sys.modules["huggingface_hub"] = None  # type: ignore[assignment]
    try:
        dcp.convert(checkpoint, target, **_OF_MODEL, hf="somebody/small")
    except OptionError as error:
        return str(error)
    return ""


def test_without_the_hub_s_library(checkpoint: Path, tmp_path: Path) -> None:
    """A name of a model is an error that says what to install."""
    assert "install huggingface_hub" in in_lab(_without_the_hub, str(checkpoint), str(tmp_path / "hf"))


def test_files_of_all_tokenizers_are_copied(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """By the names that those of transformers say their vocabularies have."""
    package = find_spec("transformers")
    assert package is not None and package.origin is not None
    models = Path(package.origin).parent / "models"
    found: set[str] = set()
    for path in models.glob("*/tokenization_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "VOCAB_FILES_NAMES":
                values = node.value.values if isinstance(node.value, ast.Dict) else []
                found |= {str(value.value) for value in values if isinstance(value, ast.Constant)}
    assert len(found) > 15
    shutil.copytree(template, folder := tmp_path / "template")
    for name in found:
        (folder / name).write_text("{}")
    dcp.convert(checkpoint, tmp_path / "hf", **_OF_MODEL, hf=folder)
    assert found <= _names(tmp_path / "hf")


def test_a_processor_of_several_parts(template: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A feature extractor, further chat templates, and tokenizers in folders of their own: what
    `from_pretrained` makes of each is as of the template."""
    import transformers

    library: Any = transformers
    folder = tmp_path / "template"
    shutil.copytree(template, folder)
    tokenizer = _tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools"}
    tokenizer.save_pretrained(folder)
    library.Wav2Vec2FeatureExtractor(sampling_rate=8000, padding_value=0.5).save_pretrained(folder)
    library.RagTokenizer(_tokenizer(), _tokenizer()).save_pretrained(folder)
    opened = library.AutoTokenizer.from_pretrained
    dcp.convert(checkpoint, tmp_path / "hf", **_OF_MODEL, hf=folder)
    found, expected = (
        [
            opened(place).chat_template,
            opened(place, subfolder="question_encoder_tokenizer")(_TEXT)["input_ids"],
            opened(place, subfolder="generator_tokenizer").chat_template,
            library.AutoFeatureExtractor.from_pretrained(place).to_dict(),
        ]
        for place in (tmp_path / "hf", folder)
    )
    assert found == expected and found[0] == tokenizer.chat_template

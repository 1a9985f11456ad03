"""Program that prints names, shapes and dtypes of the model of a Hugging Face config.json.

``python -m dcp.integrations.model_shapes`` reads JSON from standard input and writes ``{"architecture",
"tensors": [{"fqn", "dtype", "shape"}]}`` or ``{"problem"}`` to standard output. The model is created on the
meta device by classes of transformers; no code of a model repository is run, and nothing is downloaded.
Processor time, memory and modules are limited against untrusted configurations.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from collections.abc import Iterable
from typing import Any, Final

_CPU_SECONDS: Final = 90
_MEMORY_BYTES: Final = 6 << 30
_MAX_MODULES: Final = 200_000
_MAX_TENSORS: Final = 100_000
_MAX_PROBLEM: Final = 500
_LEFT_OUT: Final = frozenset(
    {
        "auto_map",
        "_name_or_path",
        "quantization_config",
        "transformers_version",
        *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
    }
)
"""Configuration keys to remove at any depth: names of code, remote locations and kernels, and
quantization.
"""
_MAKER: Final = "_from_config"
"""Constructor method of transformers that applies the configured dtype."""


class _ConfigError(Exception):
    pass


def model_shapes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the program's answer. Raises errors of transformers."""
    import torch

    model_class, made = _class_and_config(config)
    _bound_modules()
    with torch.device("meta"), torch.no_grad():
        model = getattr(model_class, _MAKER)(made)
    tensors = model.state_dict()
    if len(tensors) > _MAX_TENSORS:
        raise _ConfigError(f"the model has {len(tensors):,} tensors, more than the limit of {_MAX_TENSORS:,}")
    return {
        "architecture": model_class.__name__,
        "tensors": [
            {"fqn": name, "dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.shape)}
            for name, one in tensors.items()
        ],
    }


def _class_and_config(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the transformers class of the configuration, or the class with a head of its type."""
    import transformers
    from transformers.models.auto import modeling_auto

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise _ConfigError(
            f"transformers {transformers.__version__} has no model_type {str(kind)[:80]!r}, and code of a "
            "model repository is not executed"
        )
    mappings = [value for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    known = {name for mapping in mappings for names in mapping.values() for name in _each(names)}
    asked = [name for name in _each(config.get("architectures") or ()) if name in known]
    heads = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES)
    found = [*asked, *(name for mapping in heads for name in _each(mapping.get(kind, ())))]
    if not found:
        raise _ConfigError(f"transformers {transformers.__version__} has no model of the type {kind!r}")
    made = transformers.CONFIG_MAPPING[kind].from_dict(_harmless(config), attn_implementation="eager")
    return getattr(transformers, found[0]), made


def _harmless(given: Any) -> Any:
    """Remove unwanted keys at any depth."""
    if isinstance(given, dict):
        return {name: _harmless(value) for name, value in given.items() if name not in _LEFT_OUT}
    return [_harmless(one) for one in given] if isinstance(given, list) else given


def _each(names: Any) -> Iterable[str]:
    given = [names] if isinstance(names, str) else names if isinstance(names, list | tuple) else []
    return [name for name in given if isinstance(name, str)]


def _bound_modules() -> None:
    from torch.nn.modules.module import register_module_module_registration_hook

    seen = 0

    def count(module: Any, name: str, submodule: Any) -> None:
        nonlocal seen
        seen += 1
        if seen > _MAX_MODULES:
            raise _ConfigError(f"the model has more than {_MAX_MODULES:,} modules")

    register_module_module_registration_hook(count)


def _bound_process() -> None:
    for limit, most in ((resource.RLIMIT_CPU, _CPU_SECONDS), (resource.RLIMIT_DATA, _MEMORY_BYTES)):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _found(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
        if not isinstance(config, dict):
            raise _ConfigError("the configuration is not a JSON object")
        return model_shapes(config)
    except _ConfigError as error:
        return {"problem": str(error)}
    except ImportError as error:
        reason = f"{error.name} is not installed" if error.name else " ".join(str(error).split())
        return {"problem": f"in the worker's environment: {reason[:_MAX_PROBLEM]}"}
    except MemoryError:
        return {"problem": "creating the model needs more memory than a job may use"}
    except Exception as error:  # noqa: BLE001 - any error of the classes is a problem of the configuration
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return {"problem": f"transformers cannot create the model: {reason[:_MAX_PROBLEM]}"}


def main() -> None:
    """Read the configuration, limit this process, build the model, write the answer."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    logging.disable(logging.CRITICAL)
    text = sys.stdin.read()
    _bound_process()
    output, sys.stdout = sys.stdout, sys.stderr  # output of the models' code is no part of the answer
    output.write(json.dumps(_found(text)))


if __name__ == "__main__":
    main()

"""Average models with mergekit, in an environment without dcphub, because mergekit pins older packages."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def _main(source: Path, target: Path) -> None:
    from mergekit.config import MergeConfiguration  # type: ignore[import-not-found]
    from mergekit.merge import MergeOptions, run_merge  # type: ignore[import-not-found]

    models = sorted(path for path in source.iterdir() if path.is_dir())
    recipe = {
        "models": [{"model": str(model), "parameters": {"weight": 1 / len(models)}} for model in models],
        "merge_method": "linear",
        "parameters": {"normalize": False},
        "dtype": "float32",
        "out_dtype": "bfloat16",
    }
    options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
    begun = time.perf_counter()
    run_merge(MergeConfiguration.model_validate(recipe), str(target), options=options)
    for file in target.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    print(json.dumps({"seconds": time.perf_counter() - begun}))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Public programs for stock torch run with our name in place of torch's, and come to the same end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import keystr, tree_leaves_with_path

from tests.support.ranks import run_ranks

PROGRAMS = Path(__file__).with_name("programs")


def run_program(rank: int, world_size: int, program: str, package: str, folder: Path) -> dict[str, Any]:
    """Its ``main``, with ``package`` wherever it says ``torch.distributed.checkpoint``."""
    text = (PROGRAMS / program).read_text().replace("torch.distributed.checkpoint", package)
    if package == "dcp":
        text = text.replace("import dcp as dcp", "import dcp")
    names: dict[str, Any] = {"__name__": program}
    exec(compile(text, program, "exec", dont_inherit=True), names)
    result = names["main"](folder)
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("program", ["full_state.py", "trainer.py"])
def test_a_program_comes_to_the_same_end(program: str, tmp_path: Path) -> None:
    """Bit for bit: the model after a resume and a step, what was stored, what was exported."""
    results = []
    for package in ("torch.distributed.checkpoint", "dcp"):
        folder = tmp_path / package
        folder.mkdir()
        if package != "dcp" and program == "trainer.py" and torch.__version__.startswith(("2.11.", "2.12.")):
            with pytest.raises(AssertionError, match="KeyError: <class 'type'>"):  # its stager serves once
                run_ranks(2, run_program, program, package, folder)
            continue
        results.append(run_ranks(2, run_program, program, package, folder)[0])
    ends = [{keystr(path): value for path, value in tree_leaves_with_path(end)} for end in results]
    stock, ours = ends[0], ends[-1]
    assert sorted(stock) == sorted(ours)
    assert len(ours) > 10
    for name, theirs in stock.items():
        assert torch.equal(theirs, ours[name]) if isinstance(theirs, torch.Tensor) else theirs == ours[name]

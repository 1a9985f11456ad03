"""Use of torch's private names. Internal: one module has the range of versions."""

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp.storage import torch_compat
from dcp.storage.torch_compat import UntestedTorchWarning, warn_if_untested
from tests.support.programs import run_program

ROOT = Path(__file__).parents[2]
FOLDERS = ("dcp", "planners", "server", "storage")
ONLY = Path("storage/torch_compat.py")
INTEGRATIONS = Path("dcp/integrations")
OTHERS = {"os", "sys", "threading"}  # modules with private names in use, for lack of public ones


def modules() -> list[Path]:
    """Return all modules of the product that mention torch, by path below the root."""
    links = {path for path in (ROOT / "dcp").iterdir() if path.is_symlink()}
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    paths = (path for path in found if not links & {*path.parents} and "torch" in path.read_text())
    return sorted(path.relative_to(ROOT) for path in paths)


def is_private(name: str) -> bool:
    """Return whether a dotted name has a private part."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def own_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield private names that the product's own classes define: methods, fields, attributes of ``self``."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            yield node.attr


def torchs_names(path: Path, nodes: list[ast.AST]) -> list[str]:
    """Return torch's private names that a module imports or looks up; the latter may be the product's."""
    uses_torch = False
    found = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            uses_torch = True
            door_of = f"torch.distributed.checkpoint.{path.stem}" if path.parent == Path("dcp") else None
            if node.module != door_of:  # such a module re-exports the names of torch's module
                found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            uses_torch |= any(alias.name.partition(".")[0] == "torch" for alias in node.names)
            found += [alias.name for alias in node.names if alias.name.startswith("torch.")]
    own = set()
    if path.parent == INTEGRATIONS:  # lists the framework's private names that it uses, for its test
        texts = (node.value for node in nodes if isinstance(node, ast.Constant))
        own = {text for text in texts if isinstance(text, str)}
    for node in nodes if uses_torch else ():
        if isinstance(node, ast.Attribute) and node.attr not in own and is_private(node.attr):
            holder = ast.unparse(node.value)
            if holder.partition(".")[0] not in {*OTHERS, "self", "cls"}:
                found.append(f"torch?.{node.attr}")
    return [name for name in found if is_private(name)]


def test_one_module_has_all_private_names_of_torch() -> None:
    """All private names of torch are used in one module, with fallbacks for versions that lack them."""
    own = {"_fields", "_make", "_replace", "_asdict", "_mapping"}  # of named tuples and SQLAlchemy
    found = {}
    gc.disable()  # python/cpython#106905
    for path in modules():
        nodes = list(ast.walk(ast.parse((ROOT / path).read_text())))
        found[str(path)] = {name.removeprefix("torch?.") for name in torchs_names(path, nodes)}
        own.update(own_names(nodes) if path != ONLY else ())
    gc.enable()
    private = {path: names - own for path, names in found.items() if names - own}
    assert set(private) == {str(ONLY)}, private


def test_the_torch_extra_allows_the_tested_versions() -> None:
    """The torch extra of the package allows exactly the tested versions."""
    oldest, newest = torch_compat.TESTED
    allowed = f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    assert f'torch = ["{allowed}"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0a0+git1234", "3.0.0", "2.9.1+cu128"])
def test_an_untested_torch_gives_a_warning(version: str) -> None:
    """An untested torch gives a warning of its own class, with the tested versions."""
    with pytest.warns(UntestedTorchWarning, match=r"torch .* was not tested .* torch 2\.10 to 2\.15\)"):
        warn_if_untested(version)


def test_the_warning_comes_once_a_process() -> None:
    """The warning is given once, at the first import that needs torch."""
    program = (
        "import sys, torch; torch.__version__ = '2.99.0'\n"
        "for name in [name for name in sys.modules if name.split('.')[0] == 'dcp']: del sys.modules[name]\n"
        "import dcp; dcp.save, dcp.load, dcp.CheckpointManager, dcp.async_save\n"
    )
    run = run_program("-c", program, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("UntestedTorchWarning") == 1, run.stderr

"""Folders, packages in pyproject.toml, symlinks and the built wheel agree; nothing pulls torch in."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("planners", "server", "storage")
IGNORED = shutil.ignore_patterns("__pycache__")


def project_settings() -> dict[str, object]:
    """The setuptools table of pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert isinstance(settings, dict)
    return settings


def source_files() -> dict[str, Path]:
    """Every file that belongs into the wheel, by its path there: of ``dcp``, and of the layers below it."""
    found = {}
    for folder in ("dcp", *LAYERS):
        for path in sorted((ROOT / folder).rglob("*")):
            relative = path.relative_to(ROOT)
            linked = relative.parts[0] == "dcp" and len(relative.parts) > 1 and relative.parts[1] in LAYERS
            if path.is_file() and not linked and "__pycache__" not in relative.parts:
                found["/".join(relative.parts if folder == "dcp" else ("dcp", *relative.parts))] = path
    return found


def test_symlinks_point_at_the_folders_relatively() -> None:
    """Each layer is below dcp by a relative symlink, so that a clone works wherever it is."""
    for layer in LAYERS:
        link = ROOT / "dcp" / layer
        assert link.is_symlink()
        assert link.readlink() == Path("..") / layer
        assert (link / "__init__.py").samefile(ROOT / layer / "__init__.py")


def test_package_dir_says_the_same_as_the_symlinks() -> None:
    """The mapping that builds the wheel and the links that type checkers follow name the same folders."""
    expected = {"dcp": "dcp", **{f"dcp.{layer}": layer for layer in LAYERS}}
    assert project_settings()["package-dir"] == expected


def test_every_folder_with_modules_is_a_listed_package() -> None:
    """A folder of modules that pyproject.toml does not list would be missing once installed."""
    modules = [Path(name) for name in source_files() if name.endswith(".py")]
    on_disk = {".".join(module.parent.parts) for module in modules}
    packages = project_settings()["packages"]
    assert isinstance(packages, list)
    assert packages == sorted(on_disk)
    for name in on_disk:
        assert f"{name.replace('.', '/')}/__init__.py" in source_files()


def test_wheel_holds_exactly_the_source_files(tmp_path: Path) -> None:
    """The wheel has every module and data file of the folders, nothing else, no generic top-level name."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for folder in ("dcp", *LAYERS):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=IGNORED)
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('out'))"
    (copy / "out").mkdir()
    run = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    with zipfile.ZipFile(copy / "out" / run.stdout.split()[-1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = [name for name in wheel.namelist() if ".dist-info/" in name]
    assert names == set(source_files())
    assert any(name.endswith("/LICENSE") for name in metadata)


TORCH_FREE = (
    "dcp",
    "dcp.errors",
    "dcp.cli",
    "dcp.difference",
    "dcp.inspection",
    "dcp.server",
    "dcp.statistics",
    "dcp.storage",
    "dcp.verification",
    *(
        ".".join(Path(name).with_suffix("").parts)
        for name in source_files()
        if name.startswith(("dcp/cli/", "dcp/storage/formats/", "dcp/storage/stores/"))
        and name.endswith(".py")
        # the contract test which stores are shipped with needs pytest, not more
        and not name.endswith(("__init__.py", "stores/contract.py"))
    ),
)


def test_formats_stores_command_line_and_service_do_not_import_torch() -> None:
    """A machine without torch can list, show and verify, and the command does not wait for it to import."""
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, *TORCH_FREE], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_one_module_under_one_name(layer: str) -> None:
    """The package below dcp is the folder at the top, not a copy that could differ."""
    module = __import__(f"dcp.{layer}", fromlist=["__file__"])
    assert module.__file__ is not None
    assert Path(module.__file__).samefile(ROOT / layer / "__init__.py")

"""Folders, packages in pyproject.toml, symlinks and the built wheel agree, and import no torch."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("planners", "server", "storage")
IGNORED = shutil.ignore_patterns("__pycache__")


def project_settings() -> dict[str, object]:
    """Return the setuptools table of pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert isinstance(settings, dict)
    return settings


def source_files() -> dict[str, Path]:
    """Return each file of the wheel, by its path there: of ``dcp``, and of the layers below it."""
    found = {}
    for folder in ("dcp", *LAYERS):
        for path in sorted((ROOT / folder).rglob("*")):
            relative = path.relative_to(ROOT)
            linked = relative.parts[0] == "dcp" and len(relative.parts) > 1 and relative.parts[1] in LAYERS
            if path.is_file() and not linked and "__pycache__" not in relative.parts:
                found["/".join(relative.parts if folder == "dcp" else ("dcp", *relative.parts))] = path
    return found


def copy_of_the_source(folder: Path) -> Path:
    """Copy the files that a build needs, with an empty folder ``out``."""
    folder.mkdir()
    for name in ("dcp", "src", *LAYERS):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=IGNORED)
    for name in ("LICENSE", "NOTICE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "out").mkdir()
    return folder


def test_symlinks_point_at_the_folders_relatively() -> None:
    """Each layer is below dcp by a relative symlink, so a clone works at any path."""
    for layer in LAYERS:
        link = ROOT / "dcp" / layer
        assert link.is_symlink()
        assert link.readlink() == Path("..") / layer
        assert (link / "__init__.py").samefile(ROOT / layer / "__init__.py")


def test_src_has_nothing_but_the_package() -> None:
    """An editable install adds only the link to dcp to the import path."""
    assert project_settings()["package-dir"] == {"": "src"}
    # setuptools adds its own record of an editable install
    (link,) = (path for path in (ROOT / "src").iterdir() if path.suffix != ".egg-info")
    assert (link.name, link.readlink()) == ("dcp", Path("../dcp"))


USERS_FILE = """
from typing import Any

import dcp
import torch
from dcp.planners.per_rank import PerRank
from dcp.storage import StorageReader
from dcp.storage.stores import PosixStore


def train(root: str, reader: StorageReader) -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.ones(2), "rng": PerRank(torch.get_rng_state())}
    dcp.save(state, checkpoint_id=root)
    reveal_type(dcp.load(state, checkpoint_id=root, storage_reader=reader))
    with dcp.CheckpointManager(root, keep=dcp.Retention(best=dcp.Best("loss"))) as manager:
        manager.save(1, state, metrics={"loss": torch.ones(())})
    reveal_type(PosixStore(root))
    return dcp.read(root, only="w")
"""


def built(folder: Path, kind: str) -> zipfile.ZipFile:
    """Build a wheel of ``kind`` from a copy of the source."""
    copy = copy_of_the_source(folder / "copy")
    build = f"from setuptools import build_meta; print(build_meta.build_{kind}('out'))"
    run = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return zipfile.ZipFile(copy / "out" / run.stdout.split()[-1])


@pytest.mark.exhaustive  # mypy reads all of torch
def test_a_users_project_sees_the_types(tmp_path: Path) -> None:
    """mypy --strict finds the types of the package and its layers by the path of an editable install."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "user.py").write_text(USERS_FILE)
    options = ["--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", *options, "user.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    run = subprocess.run(
        command, cwd=tmp_path / "project", capture_output=True, text=True, env=environment, timeout=600
    )
    assert run.returncode == 0, run.stdout
    for revealed in ("dcp.loading.feature.LoadReport", "dcp.storage.stores.posix.store.PosixStore"):
        assert f'"{revealed}"' in run.stdout


def test_every_folder_with_modules_is_a_listed_package() -> None:
    """A folder of modules that pyproject.toml does not list would be missing after an install."""
    files = source_files()
    modules = [Path(name) for name in files if name.endswith(".py")]
    on_disk = {".".join(module.parent.parts) for module in modules}
    packages = project_settings()["packages"]
    assert isinstance(packages, list)
    assert packages == sorted(on_disk)
    for name in on_disk:
        assert f"{name.replace('.', '/')}/__init__.py" in files


def test_wheel_holds_exactly_the_source_files(tmp_path: Path) -> None:
    """The wheel has exactly the modules and data files of the folders, under no generic top-level name."""
    with built(tmp_path, "wheel") as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = [name for name in wheel.namelist() if ".dist-info/" in name]
    assert names == set(source_files())
    licences = {name.partition("/licenses/")[2] for name in metadata if "/licenses/" in name}
    vendor = "server/core/pages/static/vendor"
    vendored = {f"{vendor}/{path.name}" for path in (ROOT / vendor).glob("*.LICENSE")}
    assert vendored and licences == {"LICENSE", "NOTICE"} | vendored


def test_the_version_is_the_same_everywhere() -> None:
    """Package, changelog, OpenAPI document, images and pages have one version."""
    found = set(re.findall(r'__version__ = "(.+)"', (ROOT / "dcp/version.py").read_text()))
    found |= set(re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[:1])
    found |= {json.loads((ROOT / "tests/service/openapi.json").read_text())["info"]["version"]}
    pages = ("deploy/Containerfile", "deploy/compose.yaml", "docs/how-to/run-the-service.md")
    for name in pages:
        tags = set(re.findall(r"dcphub-server:([\w.]+)", (ROOT / name).read_text()))
        assert tags, name
        found |= tags
    assert len(found) == 1, found


TORCH_FREE = (
    *("dcp", "dcp.errors", "dcp.inspection", "dcp.inspection.values.difference"),
    *("dcp.inspection.values.statistics", "dcp.inspection.verification", "dcp.server", "dcp.storage"),
    *(
        ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__")
        for name in source_files()
        if name.startswith(("dcp/cli/", "dcp/storage/formats/", "dcp/storage/stores/"))
        # the contract tests of stores need pytest
        and name.endswith(".py")
        and not name.endswith("stores/contract.py")
    ),
)


def test_formats_stores_command_line_and_service_do_not_import_torch() -> None:
    """Commands that list, show and verify work without torch, and do not import torch."""
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

"""Rules of the test suite: few lines, public interfaces, readable tests."""

from __future__ import annotations

import re
import statistics
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tests.support.suite import ROOT, Module, modules


def _stands_for_torchs(name: str) -> bool:
    return find_spec(f"torch.distributed.checkpoint.{name}") is not None


INSIDE: Final = ("docs/design", "docs/contributing.md")
"""Pages on the implementation; the modules that they name are not public."""

DOORS: Final = frozenset(
    {"dcp", "dcp.demo", "dcp.integrations"}
    | {f"dcp.{path.stem}" for path in (ROOT / "dcp").glob("*.py") if _stands_for_torchs(path.stem)}
    | {
        f"dcp.{name}"
        for name in (
            "conversion.layout",
            "conversion.targets.job",
            "features.registry",
            "storage.formats.format",
            "storage.formats.index",
            "storage.formats.registry",
            "storage.stores.contract",
        )
    }
    | {f"dcp.integrations.{path.stem}" for path in (ROOT / "dcp/integrations").glob("[a-z]*.py")}
)
"""Public modules that need no page: modules in place of torch's, plug-ins of trainers, and interfaces for
formats and stores of other packages, as write-a-plug-in.md says."""

FOREIGN: Final = frozenset(
    {"_C", "_EmptyStateDictLoadPlanner", "_cached_global_plan", "_cached_metadata", "_cached_save_plan"}
    | {"_custom_objects", "_derived_version", "_get_default_store", "_lightning_module", "_load_state_dict"}
    | {"_load_state_dict_from_keys", "_make_wrapper_subclass", "_metadata", "_neg_view", "_nested_dict"}
    | {"_spec", "_version"}
)
"""Private names of torch and of trainers that the product implements or replaces."""

MOST_LINES: Final = 58_600
"""55,000, and 3,000 for people, quotas, notes, stages, handovers and the comparison of runs."""
MOST_INTERNAL: Final = 0.15
MOST_PATCHES: Final = 20
"""These limits may only decrease, apart from a new feature's share of lines."""

MEDIAN_LINES: Final = 12
_PATCH: Final = re.compile(
    r"\b(?:monkeypatch|patch|context)\.(?:setattr|setitem|delattr|delitem)\(|\bmock\.patch\b"
)
_FOREIGN: Final = re.compile(
    r"\b_pytest\b|\b_hypothesis\w*|Popen\._\w+|\bforkserver\._\w+|\bthreading\._\w+|\batexit\._\w+"
)


@cache
def _named_by_pages() -> frozenset[str]:
    pages = [
        page for page in (ROOT / "docs").rglob("*.md") if not str(page.relative_to(ROOT)).startswith(INSIDE)
    ]
    found: set[str] = set()
    for page in (*pages, ROOT / "README.md"):
        found |= set(re.findall(r"\bdcp(?:\.\w+)+", page.read_text()))
    return frozenset(found)


def is_public(name: str) -> bool:
    """Return whether a module is in `DOORS`, or a page for users names it or a name in it."""
    return name in DOORS or any(known == name or known.startswith(f"{name}.") for known in _named_by_pages())


def internal(module: Module) -> list[str]:
    """Return the imported modules of dcp that no page names."""
    return sorted(name for name in module.imported if name.startswith("dcp.") and not is_public(name))


def test_the_suite_stays_within_its_limit_of_lines() -> None:
    """The suite stays within its limit of lines: remove repetitions before you add tests."""
    lines = {module.name: module.text.count("\n") for module in modules()}
    assert sum(lines.values()) <= MOST_LINES, sorted(lines, key=lambda name: -lines[name])[:20]


def test_few_files_import_internals_with_a_reason() -> None:
    """Few tests import internals, small and pure; the file's first line has "Internal:" and a reason."""
    tests = [module for module in modules() if module.is_test]
    inside = [module for module in tests if internal(module)]
    silent = {module.name: internal(module) for module in inside if "Internal:" not in module.first_line}
    assert not silent, silent
    assert len(inside) <= MOST_INTERNAL * len(tests), [module.name for module in inside]


def test_every_test_has_a_docstring() -> None:
    """Each test has a docstring, for readers who see the test for the first time as a failure."""
    assert not [test.name for module in modules() for test in module.tests if not test.has_docstring]


def test_the_median_test_is_short() -> None:
    """The median test is short: a long test checks several behaviours, or should use a fixture."""
    lines = [test.lines for module in modules() for test in module.tests if test.lines]
    assert statistics.median(lines) <= MEDIAN_LINES


def test_few_tests_patch_the_product() -> None:
    """Few tests patch the product, because users have no patched product."""
    found = {m.name: len(_PATCH.findall(m.text)) for m in _other_modules()}
    assert sum(found.values()) <= MOST_PATCHES, {name: count for name, count in found.items() if count}


def test_no_private_attribute_is_used() -> None:
    """Tests use no private attributes, which may be renamed; "Internal:" files may use theirs."""
    tests = [module for module in modules() if module.is_test and "Internal:" not in module.first_line]
    found = {m.name: sorted(m.private - FOREIGN) for m in tests if m.private - FOREIGN}
    assert not found, found


def test_no_private_name_of_the_tools_is_used() -> None:
    """Tests use no private names of pytest, hypothesis or Python, which the next release may remove."""
    found = {m.name: _FOREIGN.findall(m.text) for m in _other_modules()}
    assert not {name: names for name, names in found.items() if names}


def test_only_profiles_set_numbers_of_examples() -> None:
    """Only `tests.support.examples` sets numbers of examples, so that `make test` can use fewer."""
    found = [m.name for m in _other_modules() if "max_examples=" in m.text]
    assert found == ["tests/support/examples.py"]


def _other_modules() -> list[Module]:
    return [module for module in modules() if module.path != Path(__file__)]

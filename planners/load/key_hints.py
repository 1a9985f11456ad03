"""Hints for keys that a checkpoint lacks: names of it that were meant, and a renaming that finds them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

from dcp.storage.near_names import listed, near_names

__all__ = ["OTHER_GROUPS", "hint_for_missing", "is_group", "rename_for_missing"]

WRAPPERS: Final = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What wrappers of modules put into keys: DDP, torch.compile, FSDP, activation checkpointing."""

_SUGGESTED: Final = 2
"""Missing keys for each of which a name is suggested."""

_DEPTH: Final = 64
"""Beginnings of one name that are taken away; modules are not nested deeper."""

_GROUP: Final = re.compile(r"(?:^|\.)param_groups\.[0-9]+(?:\.params)?$")

_PREFIXES: Final = 8
"""Other beginnings of names that are tried."""

OTHER_GROUPS: Final = (
    "Groups of an optimizer are numbered: where some were added or removed, others may get their state. Save "
    "and load by the names of parameters, get_optimizer_state_dict() with "
    "StateDictOptions(flatten_optimizer_state_dict=True)"
)
"""What to say in place of options that would leave a group out."""

Rules = Mapping[str, str]


def hint_for_missing(
    missing: Sequence[str], unused: Sequence[str], found: Collection[str], *, is_renamed: bool
) -> str:
    """Return the hint for ``missing`` names, of which there is one at least.

    ``unused``: names of the checkpoint that are not loaded; ``found``: those that are found as they are,
    which no renaming may change. ``is_renamed``: whether the names were made by ``rename=``.
    """
    rules, count = rename_for_missing(missing, unused, found)
    if rules:
        shown = ", ".join(f"{_raw(regex)}: {_raw(text)}" for regex, text in rules.items())
        which = "it" if len(missing) == 1 else "them all" if count == len(missing) else f"{count:,} of them"
        how = f"add {{{shown}}} to rename" if is_renamed else f"pass rename={{{shown}}}"
        return f"It has {which} under other names: {how}."
    suggested = {name: near_names(name, unused) for name in missing[:_SUGGESTED]}
    close = {name: names for name, names in suggested.items() if names}
    if len(missing) == 1 and close:
        (names,) = close.values()
        return f"Did you mean {' or '.join(map(repr, names))}?"
    if close:
        shown = ", ".join(f"{names[0]!r} for {name!r}" for name, names in close.items())
        return f"Did you mean {shown}?"
    if any(map(is_group, missing)) and any(map(is_group, found)):
        return f"{OTHER_GROUPS}."
    there = f"It has {listed(_summary(unused), show=str)} besides; dcp show lists all. " if unused else ""
    return f"{there}What it lacks may stay as it is with allow_partial_load=True."


def is_group(name: str) -> bool:
    """Return whether it is a group of an optimizer, or the entry that each of them has."""
    return _GROUP.search(name) is not None


def _summary(names: Sequence[str]) -> list[str]:
    """Return the first parts of ``names``, with how many there are of each."""
    counts = Counter(name.partition(".")[0] for name in names)
    several = {name.partition(".")[0] for name in names if "." in name}
    return [f"{part}.* ({count:,})" if part in several else repr(part) for part, count in counts.items()]


def rename_for_missing(
    missing: Sequence[str], unused: Sequence[str], found: Collection[str]
) -> tuple[Rules | None, int]:
    """Return the renaming that finds the most of ``missing``, at least half of them, and how many; None
    without any. The arguments are those of `hint_for_missing`."""
    there = frozenset(unused)
    best: tuple[Rules | None, int] = None, 0
    for rules in _candidates(missing, unused):
        renamed = _renaming(rules)
        count = sum(renamed(name) in there for name in missing)
        if count > best[1] and all(renamed(name) == name for name in found):
            best = rules, count
            if count == len(missing):
                break
    return best if best[1] * 2 >= len(missing) else (None, 0)


def _candidates(missing: Sequence[str], unused: Sequence[str]) -> Iterator[Rules]:
    present = [name for name in WRAPPERS if any(_has_part(other, name) for other in missing)]
    if present:
        yield {_regex_of(name, missing): "" for name in present}
    yield from _added_wrappers(missing, unused)
    if len(missing) > 1:  # of one name any other beginning would do
        yield from _other_prefixes(missing[0], unused)


def _has_part(name: str, part: str) -> bool:
    return name.startswith(f"{part}.") or f".{part}." in name


def _regex_of(wrapper: str, names: Sequence[str]) -> str:
    at_begin = all(name.startswith(f"{wrapper}.") for name in names if _has_part(name, wrapper))
    return rf"^{wrapper}\." if at_begin else rf"\b{wrapper}\."


def _added_wrappers(missing: Sequence[str], unused: Sequence[str]) -> Iterator[Rules]:
    """Suggest a wrapper's part that the checkpoint's names have, always at the same depth."""
    wanted = frozenset(missing)
    for wrapper in WRAPPERS:
        for name in unused:
            parts = name.split(".") if wrapper in name else []
            if wrapper in parts:
                depth = parts.index(wrapper)
                if ".".join(parts[:depth] + parts[depth + 1 :]) in wanted:
                    before = rf"^((?:[^.]+\.){{{depth}}})"
                    yield {before: rf"\1{wrapper}."} if depth else {"^": f"{wrapper}."}
                    break


def _other_prefixes(name: str, unused: Sequence[str]) -> Iterator[Rules]:
    """Suggest another beginning, which may be none, behind which the checkpoint has the same names."""
    parts = name.split(".")
    for first in range(min(len(parts), _DEPTH)):
        suffix = ".".join(parts[first:])
        own = name[: len(name) - len(suffix)]
        others = dict.fromkeys(
            other[: len(other) - len(suffix)]
            for other in unused
            if other.endswith(suffix) and (other == suffix or other[-len(suffix) - 1] == ".")
        )
        for other in list(others)[:_PREFIXES]:
            yield {f"^{re.escape(own)}": other.replace("\\", r"\\")}
        if others:
            return


def _renaming(rules: Rules) -> Callable[[str], str]:
    compiled = [(re.compile(regex), text) for regex, text in rules.items()]

    def renamed(name: str) -> str:
        for regex, text in compiled:
            name = regex.sub(text, name)
        return name

    return renamed


def _raw(text: str) -> str:
    """As one writes it in a program."""
    return f'r"{text}"' if "\\" in text else f'"{text}"'

"""Load options: selected entries, names in the checkpoint, and conversions.

Patterns are case-sensitive shell globs on flat keys; a pattern selects matches and everything below:
``model`` is the whole model, ``*.bias`` every bias.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypedDict, get_args

from dcp.storage.engine.requests import Verify
from dcp.storage.errors import MissingKeyError, OptionError, PlanError
from dcp.storage.near_names import close_to, did_you_mean, listed

if TYPE_CHECKING:  # weight maps import this package
    from dcp.planners.weight_maps.weight_map import WeightMap

Patterns = str | Sequence[str]
"""Glob, or several globs."""

Rename = Mapping[str, str | Callable[[re.Match[str]], str]] | Callable[[str], str]
"""Renaming from flat keys of the state dict to those of the checkpoint: regular expressions with
replacements as in `re.sub`, applied in order to the previous result, or a function of the key.
"""

_MAX_LISTED = 10
_GLOB = re.compile(r"[*?\[]")


Globs = Mapping[str, re.Pattern[str]]
"""Globs, each with the regular expression for selected names."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Entries selected by ``only`` and ``exclude``: matches of any pattern of ``only`` (all if None) and of
    no pattern of ``exclude``.
    """

    only: Globs | None
    exclude: Globs

    @classmethod
    def of(cls, only: Patterns | None, exclude: Patterns | None) -> Selection | None:
        """Return the selection; None if neither is given.

        Raises:
            PlanError: For invalid patterns.
        """
        if only is None and exclude is None:
            return None
        chosen = None if only is None else _globs("only", only)
        if chosen == {}:
            raise OptionError("only=[] selects nothing: omit only= to load everything")
        return cls(chosen, {} if exclude is None else _globs("exclude", exclude))

    def __str__(self) -> str:
        given = (("only", self.only or ()), ("exclude", self.exclude))
        return " and ".join(f"{option} {', '.join(globs)}" for option, globs in given if globs)

    def selects(self, key: str) -> bool:
        """Return True if the entry of this flat key is selected."""
        if self.only is not None and not any(regex.match(key) for regex in self.only.values()):
            return False
        return not any(regex.match(key) for regex in self.exclude.values())

    def reaches(self, key: str) -> bool:
        """Return False if nothing at or below ``key`` can be selected."""
        if self.only is not None and not any(_may_match_below(*glob, key) for glob in self.only.items()):
            return False
        return not any(
            # every name below ``key`` matches
            regex.match(key) or (text.endswith(".*") and fnmatch.fnmatchcase(key, text.removesuffix(".*")))
            for text, regex in self.exclude.items()
        )

    def match(self, keys: Iterable[str], unasked: Sequence[str], stored: Iterable[str] = ()) -> Matches:
        """Match the patterns against the flat ``keys`` of a rank.

        ``unasked`` are unselected keys whose entries were not expanded (see `reaches`). ``stored`` are
        names of the checkpoint, which may be excluded although missing in the state dict.
        """
        keys = list(keys)
        globs = [("only", *glob) for glob in (self.only or {}).items()]
        globs += [("exclude", *glob) for glob in self.exclude.items()]
        idle = [
            (option, text, regex)
            for option, text, regex in globs
            if not any(map(regex.match, keys))
            and not any(_may_match_below(text, regex, key) for key in unasked)
        ]
        names = list(stored) if any(option == "exclude" for option, *_ in idle) else []
        shown = {
            f"{option}={text!r}": _close(text, [*keys, *unasked])
            for option, text, regex in idle
            if option == "only" or not any(map(regex.match, names))
        }
        return Matches(shown, sum(map(self.selects, keys)))


class Matches(NamedTuple):
    """Matches of patterns in the state dict of a rank.

    ``idle``: patterns without matches, each with similar names; ``selected``: number of entries to load.
    Plain data for messages between ranks.
    """

    idle: dict[str, list[str]]
    selected: int


def check_matches(ranks: Sequence[Matches]) -> None:
    """Raise PlanError for a pattern without matches on any rank, and for an empty selection.

    A pipeline stage has only a part of the keys.
    """
    idle = {
        pattern: sorted({name for rank in ranks for name in rank.idle[pattern]})
        for pattern in (ranks[0].idle if ranks else {})
        if all(pattern in rank.idle for rank in ranks)
    }
    if idle:
        shown = [
            f"{pattern}{f' (did you mean {_listed(close)}?)' if close else ''}"
            for pattern, close in idle.items()
        ]
        raise PlanError(
            f"{'; '.join(shown[:_MAX_LISTED])} match{'' if len(shown) > 1 else 'es'} nothing in the state "
            "dict; patterns are shell globs on its flat keys, such as 'model.*' or '*.bias'",
            patterns=list(idle)[:_MAX_LISTED],
        )
    if ranks and not any(rank.selected for rank in ranks):
        raise OptionError("only= and exclude= together select nothing of the state dict")


def check_patterns(selection: Selection, names: Sequence[str]) -> None:
    """Check patterns against ``names``.

    Raises:
        MissingKeyError: For patterns without matches.
        OptionError: If nothing is selected.
    """
    matches = selection.match(names, [])
    if matches.idle:
        shown = [
            f"{text} (did you mean {', '.join(close)}?)" if close else text
            for text, close in matches.idle.items()
        ]
        raise MissingKeyError(f"{'; '.join(shown[:_MAX_LISTED])}: nothing in the checkpoint matches")
    if not matches.selected:
        raise OptionError("only= and exclude= together select nothing of the checkpoint")


def renamer(rename: Rename | None) -> Callable[[str], str] | None:
    """Return ``rename`` as a function of the key; None without renaming. Raises PlanError for an invalid
    renaming.
    """
    if rename is None:
        return None
    if isinstance(rename, Mapping):
        try:
            rules = [(re.compile(regex), replacement) for regex, replacement in rename.items()]
        except (re.error, TypeError) as error:
            raise OptionError(f"a key of rename= is not a valid regular expression: {error}") from error
        return partial(_substituted, rules)
    if not callable(rename):
        raise PlanError(
            f"rename= must map regular expressions to replacements, or be a function, not {rename!r:.200}"
        )
    return lambda key: _checked(key, rename(key))


def check_rules(rename: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise PlanError for rules, applied in order, that change none of ``names``."""
    idle, before = [], list(names)
    for regex, replacement in rename.items():
        after = list(map(partial(_substituted, [(re.compile(regex), replacement)]), before))
        if after == before:
            idle.append(regex)
        before = after
    if idle:
        raise PlanError(
            f"rename=: {listed(idle, most=_MAX_LISTED)} change no name of the checkpoint; patterns are "
            "regular expressions on flat keys of the checkpoint",
            patterns=idle,
        )


def _substituted(rules: Sequence[tuple[re.Pattern[str], Any]], key: str) -> str:
    name: Any = key
    for regex, replacement in rules:
        try:
            name = regex.sub(replacement, name)
        except (re.error, IndexError, TypeError) as error:
            raise PlanError(
                f"rename=: {regex.pattern!r} with the replacement {replacement!r} fails for {name!r}: "
                f"{error}",
                fqn=key,
            ) from error
    return _checked(key, name)


def _checked(key: str, name: Any) -> str:
    if not isinstance(name, str):
        raise OptionError(f"rename= must return a string, not {name!r:.200}, for {key!r}", fqn=key)
    return name


def _globs(option: str, given: Patterns) -> Globs:
    texts = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    wrong = next((text for text in texts if not isinstance(text, str) or not text), None)
    if wrong is not None:
        raise OptionError(
            f"{option}= must be shell globs on flat keys, such as 'model.*', not {wrong!r:.200}"
        )
    return {text: re.compile(f"{fnmatch.translate(text)}|{fnmatch.translate(text + '.*')}") for text in texts}


def _may_match_below(text: str, regex: re.Pattern[str], key: str) -> bool:
    """Return False if no name at or below ``key`` can match a glob."""
    below, glob = f"{key}.", _GLOB.search(text)
    if glob is None:
        return regex.match(key) is not None or text.startswith(below)
    literal = text[: glob.start()]
    return below.startswith(literal) or literal.startswith(below)


def _close(text: str, keys: Iterable[str]) -> list[str]:
    """Return similar names of the pattern's depth."""
    bare = text.removesuffix(".*")
    depth = bare.count(".") + 1
    names = {".".join(key.split(".", depth)[:depth]) for key in keys}
    return close_to(bare, sorted(names))


def _listed(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names[:3]))


# -- all options of a load -----------------------------------------------------------------------------------

PerRankLoad = Literal["exact", "keep"]
"""Treatment of `PerRank` values: require the rank's own, or keep the present value if absent."""

LoadDtype = Literal["exact", "cast"]

Unexpected = Literal["error", "ignore"]
"""Treatment of entries of the checkpoint that no rank takes, below the requested keys."""

_FLAG: Final = Literal[True, False]

_CHOICES: Final = {
    "verify": Verify,
    "dtype": LoadDtype,
    "per_rank": PerRankLoad,
    "unexpected": Unexpected,
    "allow_partial_load": _FLAG,
    "weights_only": _FLAG,  # "no" would count as True
    "progress": _FLAG,  # or a function
}

OF_PLANNERS: Final = (
    *("dtype", "allow_partial_load", "weights_only", "only", "exclude", "rename", "per_rank", "unexpected"),
)
"""Options decided by a planner."""


class LoadKeywords(TypedDict, total=False):
    """Keyword arguments of `dcp.load` about contents and conversion, for functions that pass them on."""

    verify: Verify | None
    dtype: LoadDtype | None
    allow_partial_load: bool | None
    weights_only: bool | None
    only: Patterns | None
    exclude: Patterns | None
    rename: Rename | None
    map: WeightMap | Mapping[str, Any] | str | os.PathLike[str] | None
    per_rank: PerRankLoad | None
    unexpected: Unexpected | None
    progress: bool | Callable[[Any], None] | None


def check_names(function: str, options: LoadKeywords) -> None:
    """Raise TypeError, like Python, for an unknown argument of ``function``."""
    for name in options:
        if name not in LoadKeywords.__annotations__:
            meant = did_you_mean(name, LoadKeywords.__annotations__)
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{meant}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """Options of `dcp.load`; None uses the settings of planner and reader."""

    verify: Verify | None = None
    dtype: LoadDtype | None = None
    allow_partial_load: bool | None = None
    weights_only: bool | None = None
    only: Patterns | None = None
    exclude: Patterns | None = None
    rename: Rename | None = None
    map: WeightMap | None = None
    per_rank: PerRankLoad | None = None
    unexpected: Unexpected | None = None
    progress: bool | Callable[[Any], None] | None = None

    def check(self) -> None:
        """Raise OptionError for invalid values."""
        for name, kind in _CHOICES.items():
            value, choices = getattr(self, name), get_args(kind)
            is_function = name == "progress" and callable(value)
            if value is not None and value not in choices and not is_function:
                known = " or ".join(f'"{one}"' if isinstance(one, str) else str(one) for one in choices)
                raise OptionError(f"{name} must be {known}, not {value!r}")
        Selection.of(self.only, self.exclude)
        renamer(self.rename)

    def over(self, settings: object) -> LoadOptions:
        """Return these options, with attributes of ``settings`` for a planner's options that are None."""
        own = {}
        for name in OF_PLANNERS:
            if getattr(self, name) is None:
                own[name] = getattr(settings, name)
        return replace(self, **own)

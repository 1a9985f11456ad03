"""Rules of a weight map: source and target tensors with their axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Final, NamedTuple

from dcp.planners.weight_maps.axes import Axes, AxisPlaces, NamePattern
from dcp.planners.weight_maps.pieces import MappedTensor, Piece, PieceSide
from dcp.storage.errors import OptionError, PlanError
from dcp.storage.formats.dtypes import BY_CODE
from dcp.storage.near_names import listed

_MAX_TARGETS: Final = 1 << 20
_MAX_TOLD: Final = 8
_MAX_ELEMENTS: Final = 1 << 56


class Pattern(NamedTuple):
    """Name of a rule's tensors, and their axes (None: unchanged)."""

    name: NamePattern
    axes: Axes | None


class FoundTensor(NamedTuple):
    """A source tensor: the matched pattern of the rule, with its variable parts."""

    name: str
    shape: tuple[int, ...]
    dtype_code: int
    requires_grad: bool
    pattern: int
    parts: Mapping[str, str]


_Term = tuple[str, AxisPlaces, Mapping[str, int]]
"""A source term: tensor name, positions, and the index by axis that comes from the name."""


@dataclass(frozen=True)
class MapRule:
    """A rule that makes ``targets`` of ``sources``.

    ``padding``: axes of one side only, zero in a target and dropped from a source. ``copies``: target names
    that repeat other targets, ignored as sources. ``present``: the rule applies only beside a tensor of this
    name; ``present_back`` is the inverse's. A rule without targets drops its matches.
    """

    sources: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    sizes: Mapping[str, str | int] = field(default_factory=dict)
    padding: frozenset[str] = frozenset()
    copies: frozenset[str] = frozenset()
    when: str | None = None
    present: NamePattern | None = None
    present_back: NamePattern | None = None

    def __post_init__(self) -> None:
        given = [pattern.axes is None for pattern in (*self.sources, *self.targets)]
        originals = [pattern for pattern in self.targets if pattern.name.text not in self.copies]
        is_renaming = all(given) and len(self.sources) == len(originals) == 1
        if self.targets and any(given) and not is_renaming:
            raise OptionError(
                f"{self.label}: each tensor needs axes, except in a rule that renames one tensor"
            )
        if not self.sources:
            raise OptionError("a rule needs at least one source tensor")
        for name in self.stacked | self.unstacked:
            if not self._has_axis(name):
                raise OptionError(
                    f"{self.label}: {{{name}}} occurs on one side only, so the other side needs an axis "
                    f"{name!r}"
                )
        self._check_copies()
        self._check_present()
        for side, parts in ((self.sources, self.stacked), (self.targets, self.unstacked)):
            self._check_ways(side, parts)

    @property
    def label(self) -> str:
        """Return the name for messages."""
        sides = ([pattern.name.text for pattern in side] for side in (self.sources, self.targets))
        return " -> ".join(listed(names, most=_MAX_TOLD, show=str) for names in sides)

    @property
    def inverse(self) -> MapRule:
        """The rule from targets to sources."""
        return replace(
            self,
            sources=self.targets,
            targets=self.sources,
            present=self.present_back,
            present_back=self.present,
        )

    def below(self, prefix: str) -> MapRule:
        """Return the rule for sources whose names begin with ``prefix``."""
        names = {pattern.name.text for pattern in self.sources}
        return replace(
            self,
            sources=tuple(Pattern(name.below(prefix), axes) for name, axes in self.sources),
            present=self.present and self.present.below(prefix),
            copies=frozenset(prefix + name if name in names else name for name in self.copies),
        )

    @property
    def axes(self) -> frozenset[str]:
        """Axes of both sides."""
        given = (pattern.axes for pattern in (*self.sources, *self.targets))
        return frozenset(name for axes in given if axes is not None for name in axes.names)

    @property
    def data(self) -> dict[str, Any]:
        """The rule as data, without empty fields."""
        said: dict[str, Any] = {"from": _written(self.sources), "to": _written(self.targets)}
        said |= {"sizes": dict(self.sizes), "padding": sorted(self.padding), "copies": sorted(self.copies)}
        said["when"] = self.when
        for key, pattern in (("present", self.present), ("present_back", self.present_back)):
            said[key] = pattern and pattern.text
        return {key: value for key, value in said.items() if value}

    def unspecific(self) -> tuple[int, int]:
        """Return a sort key: the number of wildcards in a source name, then less fixed text last."""
        names = [pattern.name for pattern in self.sources]
        count = max(len(name.parts_of_anything) for name in names)
        return count, -min(len(name.text) for name in names) if count else 0

    @cached_property
    def stacked(self) -> frozenset[str]:
        """Variable parts of source names that are axes of targets."""
        return _parts(self.sources) - _parts(self.targets) if self.targets else frozenset()

    @cached_property
    def unstacked(self) -> frozenset[str]:
        """Variable parts of target names that are axes of sources."""
        return _parts(self.targets) - _parts(self.sources)

    def _check_copies(self) -> None:
        """Check that each copy repeats a target of the same side."""
        sides = [{pattern.name.text for pattern in side} for side in (self.sources, self.targets)]
        for name in self.copies:
            if sum(name in side for side in sides) != 1:
                raise OptionError(
                    f"{self.label}: copies has {name!r}, which is not a name of exactly one side"
                )
        if self.targets and any(side <= self.copies for side in sides):
            raise OptionError(f"{self.label}: copies has all names of a side: leave out the original tensor")

    def _check_present(self) -> None:
        """Check that ``present`` uses only parts of the source names."""
        for side, pattern in ((self.sources, self.present), (self.targets, self.present_back)):
            if pattern is not None and not all(set(pattern.parts) <= set(own.name.parts) for own in side):
                raise OptionError(
                    f"{self.label}: present {pattern.text!r} has a variable part that the rule's names lack"
                )

    def _check_ways(self, side: Sequence[Pattern], parts: frozenset[str]) -> None:
        """Check that no two terms of one side have equal axes."""
        there: set[frozenset[str]] = set()
        for pattern in side:
            fixed = parts.intersection(pattern.name.parts)
            if pattern.axes is None or pattern.name.text in self.copies:
                continue
            for way in pattern.axes.ways:
                if twice := fixed.intersection(way):
                    raise OptionError(
                        f"{self.label}: {_joined(twice)} is both an axis and a variable part of the name"
                    )
                key = fixed.union(way)
                if key in there:
                    raise OptionError(
                        f"{self.label}: two tensors of one side have the axes {_joined(key)}: use different "
                        f"axes for different tensors, and list equal targets in copies"
                    )
                there.add(key)

    def _has_axis(self, name: str) -> bool:
        others = self.targets if name in self.stacked else self.sources
        own = self.sources if name in self.stacked else self.targets
        return any(pattern.axes is not None and name in pattern.axes.names for pattern in others) and all(
            name in pattern.name.numbers for pattern in own if name in pattern.name.parts
        )

    def match(self, name: str, names: Container[str] | None = None) -> tuple[int, dict[str, str]] | None:
        """Return (number of the source, variable parts) of a name.

        None without a match, or if ``names`` lacks the tensor of ``present``.
        """
        for number, pattern in enumerate(self.sources):
            parts = pattern.name.match(name)
            if parts is not None:
                is_there = names is None or self.present is None or self.present.format(parts) in names
                return (number, parts) if is_there else None
        return None

    def key(self, found: FoundTensor) -> tuple[tuple[str, str], ...]:
        """Return a key, equal for tensors of the same targets."""
        return tuple(sorted((name, text) for name, text in found.parts.items() if name not in self.stacked))

    def apply(
        self, tensors: Sequence[FoundTensor], sizes: Mapping[str, int], *, is_part: bool = False
    ) -> Iterator[MappedTensor]:
        """Yield the targets of ``tensors`` with one `key`. PlanError describes misfits.

        ``is_part``: other ranks may hold more items of a stack with a known size.
        """
        sources = [found for found in tensors if self.sources[found.pattern].name.text not in self.copies]
        counts: dict[str, int | None] = {}
        if is_part and not self.padding:  # padding is where no rank has elements
            counts = {name: sizes.get(name) for name in self.stacked}
        self._check_complete(sources, counts)
        known = self._solve(sources, sizes, counts)
        by_axes: dict[frozenset[str], list[_Term]] = {}
        for found in sources:
            fixed = {name: int(found.parts[name]) for name in self.stacked if name in found.parts}
            for term in self._axes(self.sources[found.pattern], found.shape).terms(known):
                own = by_axes.setdefault(frozenset((*term.steps, *fixed)), [])
                own.append((found.name, term, fixed))
        used: set[frozenset[str]] = set()
        for pattern in self.targets:
            yield from self._targets(pattern, sources, by_axes, known, used)
        for axes in by_axes.keys() - used:
            if not axes & self.padding:
                raise PlanError(f"no target contains the source elements with the axes {_joined(axes)}")

    def _check_complete(self, sources: Sequence[FoundTensor], counts: Mapping[str, int | None]) -> None:
        """Check that all sources of the targets exist; items of ``counts`` may be elsewhere."""
        there = {found.pattern for found in sources}
        parts = dict(sources[0].parts) if sources else {}
        for number, pattern in enumerate(self.sources):
            if number not in there and pattern.name.text not in self.copies:
                name = pattern.name.format({name: f"{{{name}}}" for name in pattern.name.parts} | parts)
                raise PlanError(f"the source tensor {name!r} is missing")
        by_code = {found.dtype_code: found.name for found in sources}
        if len(by_code) > 1:
            said = " and ".join(f"{name!r} is {BY_CODE[code].name}" for code, name in by_code.items())
            raise PlanError(f"tensors with different dtypes cannot be joined: {said}")
        for name in self.stacked:
            by_pattern: dict[int, set[int]] = {}
            for found in sources:
                if name in found.parts:
                    by_pattern.setdefault(found.pattern, set()).add(int(found.parts[name]))
            if (count := counts.get(name)) is not None:
                highest = max(set().union(*by_pattern.values()), default=-1)
                if highest >= count:  # missing items may be on other ranks
                    raise PlanError(
                        f"{{{name}}} is {highest} in a source tensor, but the size of {name} is {count}"
                    )
            else:
                _check_gaps(name, list(by_pattern.values()), may_be_elsewhere=name in counts)

    def _solve(
        self, sources: Sequence[FoundTensor], sizes: Mapping[str, int], counts: Mapping[str, int | None]
    ) -> dict[str, int]:
        known = dict(sizes)
        for name in self.stacked:
            if counts.get(name) is not None:
                continue
            count = len({found.parts[name] for found in sources if name in found.parts})
            if known.setdefault(name, count) != count:
                raise PlanError(f"the checkpoint has {count} of {name}, expected {known[name]}")
        for found in sources:
            try:
                known = self._axes(self.sources[found.pattern], found.shape).solve(found.shape, known)
            except PlanError as error:
                raise PlanError(f"{found.name!r}: {error}") from None
        return known

    def _axes(self, pattern: Pattern, shape: Sequence[int]) -> Axes:
        return pattern.axes or Axes.parse(" ".join(f"dim{dim}" for dim in range(len(shape))))

    def _targets(
        self,
        pattern: Pattern,
        sources: Sequence[FoundTensor],
        by_axes: Mapping[frozenset[str], Sequence[_Term]],
        known: Mapping[str, int],
        used: set[frozenset[str]],
    ) -> Iterator[MappedTensor]:
        axes = self._axes(pattern, sources[0].shape)
        lacking = [name for name in axes.names if name not in known]
        if lacking:
            raise PlanError(f"the sizes of {', '.join(lacking)} in {axes.text!r} are not known")
        if any(known[name] < 0 for name in axes.names):
            raise PlanError(f"the axes {axes.text!r} have a negative size")
        own = [name for name in pattern.name.parts if name in self.unstacked]
        count = math.prod(known[name] for name in own)
        if count > _MAX_TARGETS or count * math.prod(axes.shape(known)) > _MAX_ELEMENTS:
            raise PlanError(
                f"the axes {axes.text!r} would give more than {_MAX_TARGETS} tensors or {_MAX_ELEMENTS} "
                "elements"
            )
        for numbers in product(*(range(known[name]) for name in own)):
            fixed = dict(zip(own, numbers, strict=True))
            parts = {**sources[0].parts, **{key: str(at) for key, at in fixed.items()}}
            name = pattern.name.format(parts)
            if pattern.name.match(name) != {part: parts[part] for part in pattern.name.parts}:
                raise PlanError(
                    f"the target name {name!r} does not match {pattern.name.text!r}: the map has no inverse"
                )
            yield self._target(name, axes, fixed, sources[0], by_axes, known, used)

    def _target(
        self,
        name: str,
        axes: Axes,
        fixed: Mapping[str, int],
        like: FoundTensor,
        by_axes: Mapping[frozenset[str], Sequence[_Term]],
        known: Mapping[str, int],
        used: set[frozenset[str]],
    ) -> MappedTensor:
        pieces: list[Piece] = []
        padding = 0
        for term in axes.terms(known):
            key = frozenset((*term.steps, *fixed))
            sources = by_axes.get(key, ())
            if not sources:
                if not key & self.padding:
                    raise PlanError(f"no source has the elements of {name!r} with the axes {_joined(key)}")
                padding += math.prod(known[axis] for axis in term.steps)
            used.add(key)
            for source, own, at in sources:  # the elements that two terms of the same axes have in common
                common = [axis for axis in term.steps if axis in own.steps]
                lengths = tuple(known[axis] for axis in common)
                sides = _side(source, own, common, fixed), _side(name, term, common, at)
                pieces.append(Piece(lengths, *sides))
        return MappedTensor(
            name, axes.shape(known), pieces, like.dtype_code, like.requires_grad, padding, dict(known)
        )


def _check_gaps(name: str, found: Sequence[set[int]], *, may_be_elsewhere: bool) -> None:
    """Check that stacked items are numbered from 0 without gaps."""
    count = max(map(len, found), default=0)
    hint = f"; if another rank holds it, pass the size {name}=" if may_be_elsewhere else ""
    for numbers in found:
        if numbers != set(range(count)):
            gap = next(number for number in itertools.count() if number not in numbers)
            raise PlanError(f"{name} {gap} is missing{hint}")


def _written(patterns: Sequence[Pattern]) -> str | dict[str, str]:
    texts = {pattern.name.text: pattern.axes for pattern in patterns}
    if None in texts.values():
        (name,) = texts
        return name
    return {name: axes.text for name, axes in texts.items() if axes is not None}


def _parts(patterns: Sequence[Pattern]) -> frozenset[str]:
    return frozenset(part for pattern in patterns for part in pattern.name.parts)


def _joined(axes: frozenset[str]) -> str:
    return " ".join(sorted(axes)) or "none"


def _side(name: str, term: AxisPlaces, axes: Sequence[str], fixed: Mapping[str, int]) -> PieceSide:
    """Return the positions of ``axes``, at one index of the ``fixed`` axes."""
    base = list(term.base)
    for axis, index in fixed.items():
        if axis in term.steps:
            base[term.dims[axis]] += term.steps[axis] * index
    dims, steps = (tuple(own[axis] for axis in axes) for own in (term.dims, term.steps))
    return PieceSide(name, dims, steps, tuple(base))

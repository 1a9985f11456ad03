"""Options of conversions, common to jobs, rules, and forms."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from dcp.planners.load.selection import renamer
from dcp.planners.weight_maps.weight_map import WeightMap, ready_maps, weight_map
from dcp.server.catalog.inputs import Name, Plain, TargetFormat, fault_of_target_name
from dcp.server.core.jobs.kind import CheckpointId, Globs, Parameters, PlainText
from dcp.storage.errors import CheckpointError, PlanError
from dcp.storage.formats.dtypes import check_castable
from dcp.storage.formats.registry import SAFETENSORS, target_named
from dcp.storage.near_names import close_to

if TYPE_CHECKING:
    from dcp.conversion.targets.job import ConversionOptions

_MAX_MAP_BYTES: Final = 256 << 10

Size = Annotated[int, Field(ge=0, le=1 << 40)]


def _small(data: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(data)) > _MAX_MAP_BYTES:
        raise ValueError(f"more than {_MAX_MAP_BYTES} bytes of JSON")
    return data


MapData = Annotated[dict[str, Plain], AfterValidator(_small)]


@dataclass(frozen=True, slots=True)
class MapChoice:
    """Weight map by name or as data, never a file of the server; or none. Other fields as for
    `dcp.weight_map`."""

    given: str | Mapping[str, Any] | None = None
    inverse: bool = False
    below: str | None = None
    config: Mapping[str, Any] | None = None
    sizes: Mapping[str, int] | None = None

    def weights(self) -> WeightMap | None:
        """Return the map. Raises OptionError for invalid data."""
        if self.given is None:
            return None
        found = weight_map(self.given, self.config).with_numbers(self.sizes or {})
        return weight_map(found, inverse=self.inverse, below=self.below)

    def check(self) -> None:
        """Raise ValueError for contradictory options."""
        if self.given is None:
            if self.inverse or self.below or self.config is not None or self.sizes is not None:
                raise ValueError("inverse, below, config and sizes require a map")
            return
        if isinstance(self.given, str) and self.given not in (ready := ready_maps()):
            near = close_to(self.given, list(ready)) or list(ready)
            raise ValueError(
                f"map: {self.given!r} is not a ready map; ready maps are {', '.join(near)}. Pass other maps "
                "as data"
            )
        try:
            self.weights()
        except CheckpointError as error:
            raise ValueError(f"map: {error}") from None


class ConvertOptions(Parameters):
    """Options of a conversion, as for `dcp.convert`. The default of ``target_root`` is the source's root;
    ``tags`` are set on the target.

    ``map`` is the name of a built-in weight map, or its data. ``inverse``, ``below``, ``config`` (the content
    of a model's ``config.json``, unless stored beside the source), and ``sizes`` are options of
    `dcp.weight_map`. The folder ``hf_key`` of ``hf_root`` (default: the source's root) has the files that
    ``from_pretrained`` needs besides weights, like ``hf`` and ``hf_also`` of `dcp.convert`.
    """

    to: TargetFormat = Field(description="Format of the target.")
    target_root: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        default=None, description="Root of the target; default: the root of the source."
    )
    only: Globs | None = Field(default=None, description="Globs of names to convert; default: all.")
    exclude: Globs | None = Field(default=None, description="Globs of names to leave out.")
    rename: (
        Annotated[dict[PlainText, Annotated[str, Field(max_length=1024)]], Field(max_length=64)] | None
    ) = Field(
        default=None,
        description="Regular expressions and replacements, from names of the source to names of the target.",
    )
    map: PlainText | MapData | None = Field(
        default=None, description="Name of a ready weight map, or its data."
    )
    inverse: bool = Field(default=False, description="Reverse the map.")
    below: PlainText | None = Field(default=None, description="Prefix of the names in the source of the map.")
    config: MapData | None = Field(
        default=None,
        description="Content of the model's `config.json` for the map; default: the file beside the source.",
    )
    sizes: Annotated[dict[PlainText, Size], Field(max_length=64)] | None = Field(
        default=None, description="Numbers of the map by name, such as the number of heads."
    )
    dtype: PlainText | Annotated[dict[PlainText, PlainText], Field(max_length=256)] | None = Field(
        default=None, description="Dtype of floating-point tensors, or dtypes by glob of names."
    )
    shard_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None = Field(
        default=None, description="Maximum size of a file of shards."
    )
    files: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1, description="Number of data files of a DCP target."
    )
    chunks: Literal["keep", "split"] = Field(
        default="keep",
        description="keep: as in the source. split: each tensor is divided over all files of a DCP target.",
    )
    drop_objects: bool = Field(default=False, description="Leave out values that the format cannot store.")
    hf_key: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="Folder with the files that `from_pretrained` needs beside weights."
    )
    hf_root: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        default=None, description="Root of `hf_key`; default: the root of the source."
    )
    hf_also: Globs | None = Field(default=None, description="Globs of further files of `hf_key` to copy.")
    tags: Annotated[tuple[Name, ...], Field(max_length=32, strict=False)] = Field(
        default=(), description="Tags of the target."
    )

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name in [self.dtype] if isinstance(self.dtype, str) else (self.dtype or {}).values():
            try:
                check_castable(name)
            except PlanError as error:
                raise ValueError(str(error)) from None
        self.map_choice.check()
        _check_rename(self.rename or {})
        if self.hf_key is not None and self.to != SAFETENSORS.name:
            raise ValueError("hf_key requires to='safetensors' and a folder as target")
        if self.hf_key is None and (self.hf_root is not None or self.hf_also is not None):
            raise ValueError("hf_root and hf_also require hf_key")
        return self

    @property
    def map_choice(self) -> MapChoice:
        """The weight map."""
        return MapChoice(self.map, self.inverse, self.below, self.config, self.sizes)

    def options(self) -> ConversionOptions:
        """Return the options of the conversion."""
        from dcp.conversion.targets.job import ConversionOptions

        weights = self.map_choice.weights()
        return ConversionOptions(
            self.to,
            files=self.files,
            chunks=self.chunks,
            shard_bytes=self.shard_bytes,
            drop_objects=self.drop_objects,
            only=self.only,
            exclude=self.exclude,
            rename=None if self.rename is None else BoundedRename(self.rename),
            dtype=self.dtype,
            weight_maps=() if weights is None else (weights,),
        )


def _check_rename(expressions: Mapping[str, str]) -> None:
    check_sets(expressions)
    for pattern, replacement in expressions.items():
        try:
            _with_its_groups(re.compile(pattern)).sub(replacement, "")
        except (re.error, IndexError, OverflowError, RecursionError) as error:
            raise ValueError(f"rename: {pattern[:100]!r} is not a regular expression: {error}") from None


def _with_its_groups(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Return an expression with the same groups that matches quickly, to test a replacement. The original can
    run forever on an empty text, without a chance to interrupt."""
    names = {number: name for name, number in pattern.groupindex.items()}
    groups = (
        f"(?P<{names[number]}>)" if number in names else "()" for number in range(1, pattern.groups + 1)
    )
    return re.compile("".join(groups))


class TargetParams(ConvertOptions, ABC):
    """Options, and the key of the new target.

    ``target_key`` ends in a suffix of torch.save files such as ``.pt`` for "torch", or in ``.safetensors``
    for a single file of "safetensors". A key without a suffix is a folder, of shards for "safetensors".
    """

    target_key: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Path of the target in its root; the suffix selects a single file or a folder."
    )

    @property
    @abstractmethod
    def source_ids(self) -> Sequence[int]:
        """Ids of the sources. The default of ``target_root`` is the root of the first source."""

    @model_validator(mode="after")
    def _found_again(self) -> Self:
        fault = fault_of_target_name(target_named(self.to)[0], self.target_key.lower())
        if any(part.startswith(".") and part.strip(".") for part in self.target_key.split("/")):
            fault = "no part may begin with '.': scans skip hidden files, so the result would be lost"
        if fault is not None:
            raise ValueError(f"target_key: {fault}")
        return self


class ConvertParams(TargetParams):
    """Checkpoint of the catalog, and its conversion."""

    checkpoint_id: CheckpointId = Field(description="The `id` of the source.")

    @property
    def source_ids(self) -> Sequence[int]:
        """The checkpoint."""
        return (self.checkpoint_id,)


# -- renames with regular expressions from requests ----------------------------------------------------------


LIMIT_SECONDS: Final = 10.0
"""Processor seconds. A million names with a dozen simple expressions take a few seconds."""

_MAX_NAME_CHARACTERS: Final = 16_384
_MAX_IN_SETS: Final = 1 << 21
"""Maximum characters in the ranges of all expressions. `re` compiles about ten million a second; Unicode has
a million.
"""

_TOKEN: Final = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\([0-7]{1,3})|\\N\{[^}]*\}|\\.|.",
    re.DOTALL,
)


def check_sets(expressions: Iterable[str]) -> None:
    """Raise ValueError for ``expressions`` with large character sets, which take long to compile."""
    if sum(map(_characters_in_ranges, expressions)) > _MAX_IN_SETS:
        raise ValueError(
            f"rename: ranges in character sets, such as [a-z], have more than {_MAX_IN_SETS:,} characters in "
            r"total; use \W or a negated set [^...]"
        )


def _characters_in_ranges(expression: str) -> int:
    """Return an upper bound of the characters in ranges, inside or outside of sets."""
    tokens = list(_TOKEN.finditer(expression))
    return sum(
        max(0, _last_code(after) - _first_code(before) + 1)
        for before, hyphen, after in zip(tokens, tokens[1:], tokens[2:], strict=False)
        if hyphen[0] == "-"
    )


def _code(token: re.Match[str]) -> int | None:
    """Return the code point; None for a name, which can mean any character."""
    x, u, long, octal = token.groups()
    if octal is not None:
        return int(octal, 8)
    digits = x or u or long
    if digits is not None:
        return int(digits, 16)
    return None if token[0].startswith(r"\N") else ord(token[0][-1])


def _first_code(token: re.Match[str]) -> int:
    code = _code(token)
    return 0 if code is None else code


def _last_code(token: re.Match[str]) -> int:
    code = _code(token)
    return sys.maxunicode if code is None else min(code, sys.maxunicode)


class _TooSlowError(Exception):
    pass


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise _TooSlowError


class BoundedRename:
    """Function for ``rename`` of `dcp.convert`: applies ``expressions`` in order.

    For the main thread of a process without other work. Raises PlanError with the expression if all calls
    together take more than `LIMIT_SECONDS`, or a name becomes too long.
    """

    def __init__(self, expressions: Mapping[str, str]) -> None:
        self._steps = [(pattern, renamer({pattern: text})) for pattern, text in expressions.items()]
        self._left_seconds = LIMIT_SECONDS

    def __call__(self, name: str) -> str:
        """Return the new name."""
        before = signal.signal(signal.SIGVTALRM, _interrupt)
        begun = time.process_time()
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, max(self._left_seconds, 1e-3))
            try:
                return self._applied(name)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        finally:
            signal.signal(signal.SIGVTALRM, before)
            self._left_seconds -= time.process_time() - begun

    def _applied(self, name: str) -> str:
        new = name
        for pattern, rename in self._steps:
            try:
                new = new if rename is None else rename(new)
            except _TooSlowError:
                raise PlanError(
                    f"rename: {pattern[:100]!r} did not finish on {name[:100]!r} within the limit of "
                    f"{LIMIT_SECONDS:g} s for all names; avoid nested repeats such as (a+)+",
                    fqn=name,
                ) from None
            if len(new) > _MAX_NAME_CHARACTERS:
                raise PlanError(
                    f"rename: {pattern[:100]!r} makes more than {_MAX_NAME_CHARACTERS} characters "
                    f"of {name[:100]!r}",
                    fqn=name,
                )
        return new

"""Weight maps: ordered rules, checked against a checkpoint before any data moves."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from dcp.planners.weight_maps.axes import Axes, NamePattern, config_at, evaluate, names_in
from dcp.planners.weight_maps.pieces import MappedTensor
from dcp.planners.weight_maps.rules import FoundTensor, MapRule, Pattern
from dcp.storage.errors import CheckpointError, OptionError, PlanError
from dcp.storage.near_names import close_to, listed

_READY: Final = Path(__file__).parent / "ready"
_MAX_FILE_BYTES: Final = 4 << 20
_MAX_RULES: Final = 10_000
_MAX_MADE: Final = 1 << 19
"""Largest number of extra target tensors; each takes about 1,300 bytes of memory."""
_MAX_LISTED: Final = 10
_INVERSE: Final = " (inverse)"
_MAX_TOLD: Final = 200
_MAX_NUMBER: Final = 1 << 62
_RULE_KEYS: Final = frozenset({"from", "to", "sizes", "padding", "copies", "when", "present", "present_back"})
_MAP_KEYS: Final = frozenset({"name", "description", "models", "sizes", "counts", "rules"})
_MODEL_TYPE: Final = "model_type"

logger = logging.getLogger(__name__)

MapSource = tuple[str, tuple[int, ...], int, bool]
"""A source tensor: name, shape, dtype code, requires grad."""

_Parts = tuple[tuple[str, str], ...]
"""Variable parts of a name with their texts."""


@dataclass(frozen=True)
class WeightMap:
    """A map from the tensors of one model definition to another; the first matching rule applies.

    Make maps with `dcp.weight_map`.

    Attributes:
        rules: Rules in order.
        sizes: Axis sizes for all rules: integers, or expressions of ``config``. Other sizes follow from
            shapes.
        name: Name in messages and provenance.
        config: Model configuration for the expressions.
        numbers: Axis sizes that override ``sizes`` and ``config``.
        counts: Numbers of layers or experts in a complete checkpoint.
        models: Expected values of ``model_type``; other models log a warning.
    """

    rules: tuple[MapRule, ...]
    sizes: Mapping[str, str | int] = field(default_factory=dict)
    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    numbers: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, str | int] = field(default_factory=dict)
    keys: tuple[str, str] = ("", "")
    """Keys above the model in source and target, or ""."""
    models: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: WeightMap | Mapping[str, Any] | str | os.PathLike[str]) -> WeightMap:
        """Return a map from data, a TOML or JSON file, or the name of a ready map such as
        ``llama:hf-to-titan``.

        OptionError for an invalid map.
        """
        if isinstance(source, WeightMap):
            return source
        if isinstance(source, Mapping):
            return cls.from_data(source)
        text = os.fspath(source)
        if text in (ready := ready_maps()):
            return cls.from_data(ready[text].read_text("utf-8"), name=text)
        path = Path(text)
        is_named = path.suffix in (".toml", ".json")
        if is_named and not path.is_file():
            raise OptionError(
                f"the weight map {text} {'is not a file' if path.exists() else 'does not exist'}"
            )
        if not is_named:
            near = close_to(text, list(ready))
            shown = f" (did you mean {', '.join(near)}?)" if near else f"; ready maps: {', '.join(ready)}"
            raise OptionError(
                f"{text!r} is not a weight map: neither the name of a ready map "
                f"nor a .toml or .json file{shown}"
            )
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise OptionError(f"the weight map {text} is larger than {_MAX_FILE_BYTES} bytes")
        try:
            return cls.from_data(path.read_text("utf-8"), name=text)
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"the weight map {text} cannot be read: {error}") from error

    @classmethod
    def from_data(cls, data: Mapping[str, Any] | str, *, name: str = "") -> WeightMap:
        """Make a map from plain data, or from TOML or JSON text. OptionError for invalid content."""
        given = _parsed(data) if isinstance(data, str) else data
        name = name or str(given.get("name", ""))
        where = f"weight map {name!r}" if name else "weight map"
        _check_keys(given, _MAP_KEYS, where)
        rules = given.get("rules")
        if not isinstance(rules, Sequence) or isinstance(rules, str) or not 0 < len(rules) <= _MAX_RULES:
            raise OptionError(f"{where}: rules must be a list of 1 to {_MAX_RULES} rules")
        return cls(
            tuple(_rule(rule, f"{where}, rule {number + 1}") for number, rule in enumerate(rules)),
            _sizes(given.get("sizes", {}), where),
            name,
            description=str(given.get("description", "")),
            counts=_sizes(given.get("counts", {}), where),
            models=tuple(_texts(given.get("models", []), f"{where}: models")),
        )

    def with_config(self, config: Mapping[str, Any]) -> WeightMap:
        """Return a copy with these configuration values, which override earlier values."""
        self._warn_of_another_model(config)
        return replace(self, config={**self.config, **config})

    def with_numbers(self, sizes: Mapping[str, int]) -> WeightMap:
        """Return a copy with these axis sizes or expression names. OptionError for unknown names."""
        known = self.size_names
        for name in sizes:
            if name not in known:
                near = close_to(name, sorted(known))
                shown = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(known))}"
                raise OptionError(f"{self.name or 'the weight map'} has no size {name!r}; {shown}")
        numbers = {name: evaluate(str(size), {}) or 0 for name, size in sizes.items()}
        return replace(self.with_config(numbers), numbers=numbers) if sizes else self

    def beside(self, config: Mapping[str, Any]) -> WeightMap:
        """Return a copy with this ``config.json`` as default; earlier values take precedence."""
        if _MODEL_TYPE not in self.config:
            self._warn_of_another_model(config)
        return replace(self, config={**config, **self.config})

    def _warn_of_another_model(self, config: Mapping[str, Any]) -> None:
        """Log a warning if the configuration belongs to another model type."""
        model = config.get(_MODEL_TYPE)
        if model is not None and self.models and model not in self.models:
            logger.warning(
                "%s is for models of type %s, but this configuration has the type %r: equal names may stand "
                "for other weights",
                self.name or "the weight map",
                " or ".join(self.models),
                model,
            )

    @property
    def label(self) -> str:
        """Return the name for provenance notes."""
        return (self.name or "given")[:_MAX_TOLD]

    @property
    def identity(self) -> str:
        """A text, equal for equal maps in any process."""
        shown = {**self.data, "config": dict(self.config), "numbers": dict(self.numbers), "keys": self.keys}
        return hashlib.sha256(json.dumps(shown, sort_keys=True, default=repr).encode()).hexdigest()

    @property
    def mark(self) -> str:
        """A label to compare maps of ranks and to distinguish them in messages."""
        return f"{self.label} {self.identity[:12]}"

    @property
    def data(self) -> dict[str, Any]:
        """Rules and sizes in the form of `from_data`."""
        rules = [rule.data for rule in self.rules]
        sizes = {"sizes": dict(self.sizes), "counts": dict(self.counts)}
        return {"name": self.name, "models": list(self.models), **sizes, "rules": rules}

    @property
    def size_names(self) -> frozenset[str]:
        """Names of sizes that may be set: axes and names in expressions."""
        texts = [self.sizes, self.counts, *(rule.sizes for rule in self.rules)]
        said = [text for sizes in texts for text in sizes.values() if isinstance(text, str)]
        said += [rule.when for rule in self.rules if rule.when is not None]
        axes = (name for rule in self.rules for name in rule.axes)
        return frozenset(axes).union(*map(names_in, said), *texts)

    @property
    def inverse(self) -> WeightMap:
        """The inverse map, without dropping rules; specific rules come first."""
        invertible = (rule.inverse for rule in self.rules if rule.targets)  # others drop
        rules = tuple(sorted(invertible, key=MapRule.unspecific))
        own = self.name or "the weight map"
        name = own.removesuffix(_INVERSE) if own.endswith(_INVERSE) else own + _INVERSE
        return replace(self, rules=rules, name=name, keys=self.keys[::-1])

    def below(self, key: str) -> WeightMap:
        """Return the map for a source with the model below ``key``, as "model" of a training state."""
        source = f"{key}.{self.keys[0]}" if self.keys[0] else key
        rules = tuple(rule.below(f"{key}.") for rule in self.rules)
        return replace(self, rules=rules, keys=(source, self.keys[1]))

    def is_beside(self, name: str) -> bool:
        """Test for a source tensor outside of the model's key."""
        return bool(self.keys[0]) and not name.startswith(f"{self.keys[0]}.")

    def require_invertible(self, sources: Sequence[MapSource], tensors: Iterable[MappedTensor]) -> None:
        """Raise PlanError if a load of ``tensors`` through `inverse` would not give ``sources``. Results are
        cached."""
        structure = hash(tuple(sources))
        if structure in self._inverted:
            return
        back = self.inverse
        given = {one.name: (one.name, one.shape, one.dtype_code, one.requires_grad) for one in tensors}
        made = {one.name: one.shape for one in back.apply(given[name] for name in given if back.knows(name))}
        made |= {name: given[name][1] for name in given if not back.knows(name)}
        lost = [name for name, shape, _, _ in sources if made.get(name) != shape]
        if lost:
            raise PlanError(
                f"{back.name} does not map back to {listed(lost, most=_MAX_LISTED)}, so a checkpoint saved "
                f"through the map could not be restored: make the rules invertible",
                fqns=lost[:_MAX_LISTED],
            )
        self._inverted.add(structure)

    @cached_property
    def _inverted(self) -> set[int]:
        """Structures that passed `require_invertible`."""
        return set()

    def apply(
        self,
        tensors: Iterable[MapSource],
        *,
        is_whole: bool = False,
        is_part: bool = False,
        names: Container[str] | None = None,
    ) -> list[MappedTensor]:
        """Return the target tensors, in the order of the source.

        Args:
            is_part: Other ranks may hold more items of a stack with a known size.
            is_whole: Require all layers of ``counts``.
            names: Names of all source tensors, if ``tensors`` is a selection.

        Raises:
            PlanError: Tensors without a rule, missing parts, shapes that do not fit, duplicate names, missing
                layers; the message names all of them.
        """
        rules, sizes = self._used, self._evaluated(self.sizes)
        tensors = list(tensors)
        names = {name for name, *_ in tensors} if names is None else names
        numbers: dict[str, dict[_Parts, set[int]]] = {name: {} for name in self.counts}
        groups: dict[tuple[int, _Parts], list[FoundTensor]] = {}
        unknown: list[str] = []
        for name, shape, code, requires_grad in tensors:
            if (met := self._met(name, names)) is None:
                unknown.append(name)
                continue
            number, source, parts = met
            found = FoundTensor(name, shape, code, requires_grad, source, parts)
            groups.setdefault((number, rules[number].key(found)), []).append(found)
            for part in numbers.keys() & parts.keys():
                before = list(parts).index(part)
                numbers[part].setdefault(tuple(parts.items())[:before], set()).add(int(parts[part]))
        problems = list(map(self._describe_unknown, unknown))
        problems += self._uncounted(numbers) if is_whole else []
        mapped: dict[str, MappedTensor] = {}
        left = _MAX_MADE + sum(map(len, groups.values()))
        for (number, _), group in groups.items():
            rule = rules[number]
            if not rule.targets:
                continue
            try:
                known = {**sizes, **self._evaluated(rule.sizes), **self.numbers}
                self._check_counted(rule, known)
                for tensor in rule.apply(group, known, is_part=is_part):
                    if (left := left - 1) < 0:
                        raise PlanError(f"the map makes more than {_MAX_MADE} extra tensors")
                    if tensor.name in mapped:
                        problems.append(f"two rules make the tensor {tensor.name!r}; one is {rule.label}")
                    mapped[tensor.name] = tensor
            except CheckpointError as error:
                problems.append(f"{rule.label}: {error}")
        if problems:
            more = f" and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
            hint = self._hint(problems, unknown)
            shown = "; ".join(problems[:_MAX_LISTED])
            raise PlanError(
                f"{self.name or 'the weight map'}: {shown}{more}{hint}", problems=problems, fqns=unknown
            )
        return list(mapped.values())

    def _hint(self, problems: Sequence[str], unknown: Sequence[str]) -> str:
        """Return a hint on how to solve the problems."""
        if not self.config and any("not known" in problem for problem in problems):
            return ". Pass the model's configuration by config=, a config.json beside the weights, or sizes"
        if unknown and all(map(self.inverse.knows, unknown)):
            return (
                ". The inverse map has rules for these names: pass inverse=True to weight_map() (--inverse), "
                "or omit it if given"
            )
        for key in dict.fromkeys(name.partition(".")[0] for name in unknown):
            if any(
                self.knows(name.removeprefix(f"{key}.")) for name in unknown if name.startswith(f"{key}.")
            ):
                return f". The map has rules for the names below {key!r}: pass below={key!r} and only="
        return ". Use only= or exclude= to leave out tensors without a rule" if unknown else ""

    def _describe_unknown(self, name: str) -> str:
        """Return the reason why no rule matches a name."""
        found = ((rule, rule.match(name)) for rule in self._used if rule.present is not None)
        shown = [repr(rule.present.format(met[1])) for rule, met in found if met and rule.present is not None]
        if shown:
            return f"no rule applies to {name!r}: the checkpoint has no {' and no '.join(shown)}"
        return f"no rule matches {name!r}"

    def _check_counted(self, rule: MapRule, known: Mapping[str, int]) -> None:
        """Raise PlanError if a stack's count is declared but unknown: the last items may be missing."""
        for part in sorted(rule.stacked - known.keys()):
            if (said := rule.sizes.get(part, self.sizes.get(part))) is not None:
                raise PlanError(f"the number of {part} ({said}) is not known")

    def _uncounted(self, numbers: Mapping[str, Mapping[_Parts, set[int]]]) -> Iterator[str]:
        """Yield missing numbers of counted name parts, such as layers and experts."""
        for part, count in self._evaluated(self.counts).items():
            for before, there in numbers[part].items() if count <= _MAX_RULES else ():
                if missing := sorted(set(range(count)) - there):
                    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                    where = "".join(f", {name} {text}" for name, text in before)
                    yield (
                        f"the model has {count} of {part} ({self.counts[part]}){where}, but the checkpoint "
                        f"lacks {missing[0]}{more}"
                    )

    def knows(self, name: str) -> bool:
        """Test whether a rule takes source tensors of this name."""
        return self._met(name) is not None

    @cached_property
    def _used(self) -> list[MapRule]:
        return [rule for rule in self.rules if rule.when is None or evaluate(rule.when, self.config)]

    @cached_property
    def _by_name(self) -> dict[str, int]:
        """First rule of each fixed name; such maps have thousands of names."""
        named: dict[str, int] = {}
        for number, rule in enumerate(self._used):
            for pattern in rule.sources:
                if not pattern.name.parts and rule.present is None:
                    named.setdefault(pattern.name.text, number)
        return named

    @cached_property
    def _varying(self) -> list[int]:
        """Rules with variable names."""
        rules = enumerate(self._used)
        return [n for n, rule in rules if rule.present or any(own.name.parts for own in rule.sources)]

    def _met(self, name: str, names: Container[str] | None = None) -> tuple[int, int, dict[str, str]] | None:
        """Return the first matching rule, the number of its source, and the variable parts.

        ``names`` enables the check of ``present``.
        """
        named = self._by_name.get(name, len(self._used))
        for number in (*(number for number in self._varying if number < named), named):
            if number < len(self._used) and (met := self._used[number].match(name, names)) is not None:
                return number, *met
        return None

    def _evaluated(self, sizes: Mapping[str, str | int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, given in sizes.items():
            given = self.numbers.get(name, given)
            value = given if isinstance(given, int) else evaluate(given, {**self.config, **found})
            if value is not None:
                found[name] = value
        return found


def weight_map(
    source: WeightMap | Mapping[str, Any] | str | os.PathLike[str],
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    inverse: bool = False,
    below: str | None = None,
    **sizes: int,
) -> WeightMap:
    """Make a map from one model definition's weights to another's.

    Args:
        source: Name of a ready map, such as "llama:hf-to-titan"; a TOML or JSON file; data; or an existing
            map, such as the result of `dcp.transformers_map`.
        config: Model configuration for the map's expressions: a ``config.json`` or its content.
        inverse: Return the inverse map.
        below: Key of the model in the source, as "model" of a training state.
        **sizes: Axis sizes or configuration values; they override all others.

    Returns:
        A `WeightMap`, for the ``map`` argument of `dcp.convert`, `dcp.load`, `dcp.save`, `dcp.read`,
        `dcp.merge` and `dcp.CheckpointManager`.

    Raises:
        OptionError: The map or the configuration is invalid.

    Examples:
        >>> weights = dcp.weight_map("llama:hf-to-titan", "Llama-3.1-8B")
        >>> dcp.load(state, checkpoint_id="Llama-3.1-8B", map=weights)
    """
    found = WeightMap.of(source)
    if config is not None:
        found = found.with_config(config if isinstance(config, Mapping) else config_at(Path(config)))
    found = found.with_numbers(sizes)
    found = found.inverse if inverse else found
    return found.below(below) if below else found


def ready_maps() -> dict[str, Path]:
    """Return the ready maps by name."""
    found = {}
    for path in sorted(_READY.glob("*.toml")):
        family, _, way = path.stem.partition(".")
        found[f"{family}:{way}"] = path
    return found


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"a weight map must be valid TOML or JSON: {error}") from None
    if not isinstance(found, Mapping):
        raise OptionError("a weight map must be a table (a JSON object)")
    return found


def _rule(given: Any, where: str) -> MapRule:
    if not isinstance(given, Mapping):
        raise OptionError(f"{where} must be a table with from and to")
    _check_keys(given, _RULE_KEYS, where)
    when = given.get("when")
    if when is not None and not isinstance(when, str):
        raise OptionError(f"{where}: when must be an expression, as a string")
    beside = [given.get(key) for key in ("present", "present_back")]
    if not all(isinstance(name, str | None) for name in beside):
        raise OptionError(f"{where}: present and present_back must be the name of a tensor")
    try:
        if when is not None:
            evaluate(when, {})
        return MapRule(
            _patterns(given.get("from")),
            _patterns(given.get("to", {})),
            _sizes(given.get("sizes", {}), where),
            frozenset(_texts(given.get("padding", []), f"{where}: padding")),
            frozenset(_texts(given.get("copies", []), f"{where}: copies")),
            when,
            *(name if name is None else NamePattern.parse(name) for name in beside),
        )
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from None


def _patterns(given: Any) -> tuple[Pattern, ...]:
    """Parse a name, or names with their axes."""
    if isinstance(given, str):
        return (Pattern(NamePattern.parse(given), None),)
    if not isinstance(given, Mapping):
        raise OptionError("from and to must be a name, or a table of names with axes")
    patterns = []
    for name, axes in given.items():
        if not isinstance(axes, str):
            raise OptionError(f"the axes of {name!r} must be a string")
        patterns.append(Pattern(NamePattern.parse(name), Axes.parse(axes)))
    return tuple(patterns)


def _sizes(given: Any, where: str) -> dict[str, str | int]:
    if not isinstance(given, Mapping):
        raise OptionError(f"{where}: sizes and counts must be tables by axis")
    for name, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int | str):
            raise OptionError(f"{where}: the size of {name} must be a whole number or an expression")
        if isinstance(size, int):
            size = str(size) if abs(size) < _MAX_NUMBER else "too large"
        evaluate(size, {})
    return dict(given)


def _texts(given: Any, where: str) -> list[str]:
    if (
        not isinstance(given, Sequence)
        or isinstance(given, str)
        or not all(isinstance(x, str) for x in given)
    ):
        raise OptionError(f"{where} must be a list of strings")
    return list(given)


def _check_keys(given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    for key in given:
        if key not in known:
            near = close_to(str(key), sorted(known))
            raise OptionError(
                f"{where} has the unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )

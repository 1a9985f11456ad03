"""A whole map: rules in order, checked against what a checkpoint has before a byte moves."""

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
"""More tensors than of the source: each takes some 1,300 bytes, and empty ones may be cut into any number."""
_MAX_LISTED: Final = 10
_INVERSE: Final = " (inverse)"
_MAX_TOLD: Final = 200
_MAX_NUMBER: Final = 1 << 62
_RULE_KEYS: Final = frozenset({"from", "to", "sizes", "padding", "copies", "when", "present", "present_back"})
_MAP_KEYS: Final = frozenset({"name", "description", "models", "sizes", "counts", "rules"})
_MODEL_TYPE: Final = "model_type"

logger = logging.getLogger(__name__)

MapSource = tuple[str, tuple[int, ...], int, bool]
"""A tensor of the source: name, shape, dtype code, whether it requires grad."""

_Parts = tuple[tuple[str, str], ...]
"""Parts of a name that vary, and their texts."""


@dataclass(frozen=True)
class WeightMap:
    """A map from the tensors of one model definition to those of another; the first rule that knows a name
    has it.

    ``sizes`` are of axes, in all rules: whole numbers, or expressions of ``config``'s names. What neither
    says follows from the shapes of the source, where these can. ``numbers``, by axis, go before all of them.
    ``counts`` say how many there are of a part of names that is a number: layers, of which none is missing.
    ``models`` are the model types of configurations that it was made for; for others it warns.
    """

    rules: tuple[MapRule, ...]
    sizes: Mapping[str, str | int] = field(default_factory=dict)
    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    numbers: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, str | int] = field(default_factory=dict)
    keys: tuple[str, str] = ("", "")
    """What source and target have the model below; "" where it is at the top."""
    models: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: WeightMap | Mapping[str, Any] | str | os.PathLike[str]) -> WeightMap:
        """Return a map from its data, from a TOML or JSON file, or a ready one by its name,
        ``llama:hf-to-titan``.

        OptionError for what is none.
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
            raise OptionError(f"the weight map {text} {'is no file' if path.exists() else 'does not exist'}")
        if not is_named:
            near = close_to(text, list(ready))
            shown = f" (did you mean {', '.join(near)}?)" if near else f"; ready ones are {', '.join(ready)}"
            raise OptionError(
                f"{text!r} is no weight map: neither a ready one nor a .toml or .json file{shown}"
            )
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise OptionError(f"{text} is larger than {_MAX_FILE_BYTES} bytes")
        try:
            return cls.from_data(path.read_text("utf-8"), name=text)
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"weight map {text} cannot be read: {error}") from error

    @classmethod
    def from_data(cls, data: Mapping[str, Any] | str, *, name: str = "") -> WeightMap:
        """Make a map from plain data, or from TOML or JSON text. OptionError for anything else."""
        given = _parsed(data) if isinstance(data, str) else data
        name = name or str(given.get("name", ""))
        where = f"weight map {name!r}" if name else "weight map"
        _check_keys(given, _MAP_KEYS, where)
        rules = given.get("rules")
        if not isinstance(rules, Sequence) or isinstance(rules, str) or not 0 < len(rules) <= _MAX_RULES:
            raise OptionError(f"{where}: rules are a list of at least one")
        return cls(
            tuple(_rule(rule, f"{where}, rule {number + 1}") for number, rule in enumerate(rules)),
            _sizes(given.get("sizes", {}), where),
            name,
            description=str(given.get("description", "")),
            counts=_sizes(given.get("counts", {}), where),
            models=tuple(_texts(given.get("models", []), f"{where}: models")),
        )

    def with_config(self, config: Mapping[str, Any]) -> WeightMap:
        """Return the same with these names for its expressions: a model's ``config.json``, or sizes by
        hand, which go before those of before."""
        self._warn_of_another_model(config)
        return replace(self, config={**self.config, **config})

    def with_numbers(self, sizes: Mapping[str, int]) -> WeightMap:
        """Return the same with these numbers, of axes or names of its expressions. OptionError for other
        names."""
        known = self.size_names
        for name in sizes:
            if name not in known:
                near = close_to(name, sorted(known))
                shown = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(sorted(known))}"
                raise OptionError(f"{self.name or 'the weight map'} has no size {name!r}; {shown}")
        numbers = {name: evaluate(str(size), {}) or 0 for name, size in sizes.items()}
        return replace(self.with_config(numbers), numbers=numbers) if sizes else self

    def beside(self, config: Mapping[str, Any]) -> WeightMap:
        """Return the same for a checkpoint with this ``config.json``; what was said before goes before it."""
        if _MODEL_TYPE not in self.config:
            self._warn_of_another_model(config)
        return replace(self, config={**config, **self.config})

    def _warn_of_another_model(self, config: Mapping[str, Any]) -> None:
        """Log a warning for a configuration of a model that the map was not made for."""
        model = config.get(_MODEL_TYPE)
        if model is not None and self.models and model not in self.models:
            logger.warning(
                "%s is for models of the type %s, and this configuration says %r: names may match although "
                "the weights mean something else",
                self.name or "the weight map",
                " or ".join(self.models),
                model,
            )

    @property
    def label(self) -> str:
        """Return its name in notes on checkpoints that were made through it."""
        return (self.name or "given")[:_MAX_TOLD]

    @property
    def identity(self) -> str:
        """A text that is equal for maps that say the same, in any process."""
        shown = {**self.data, "config": dict(self.config), "numbers": dict(self.numbers), "keys": self.keys}
        return hashlib.sha256(json.dumps(shown, sort_keys=True, default=repr).encode()).hexdigest()

    @property
    def mark(self) -> str:
        """The label by which ranks compare maps, and readers distinguish them."""
        return f"{self.label} {self.identity[:12]}"

    @property
    def data(self) -> dict[str, Any]:
        """The rules and sizes as `from_data` takes them."""
        rules = [rule.data for rule in self.rules]
        sizes = {"sizes": dict(self.sizes), "counts": dict(self.counts)}
        return {"name": self.name, "models": list(self.models), **sizes, "rules": rules}

    @property
    def size_names(self) -> frozenset[str]:
        """The sizes that may be given: axes, and names of its expressions."""
        texts = [self.sizes, self.counts, *(rule.sizes for rule in self.rules)]
        said = [text for sizes in texts for text in sizes.values() if isinstance(text, str)]
        said += [rule.when for rule in self.rules if rule.when is not None]
        axes = (name for rule in self.rules for name in rule.axes)
        return frozenset(axes).union(*map(names_in, said), *texts)

    @property
    def inverse(self) -> WeightMap:
        """The other way; what a rule drops is not there then. Rules of which names say more go first: what
        one took last, as ``{rest:*}``, another may have made."""
        invertible = (rule.inverse for rule in self.rules if rule.targets)  # others drop
        rules = tuple(sorted(invertible, key=MapRule.unspecific))
        own = self.name or "the weight map"
        name = own.removesuffix(_INVERSE) if own.endswith(_INVERSE) else own + _INVERSE
        return replace(self, rules=rules, name=name, keys=self.keys[::-1])

    def below(self, key: str) -> WeightMap:
        """Return the same for a source that has the model below ``key``, as "model" of a training state."""
        source = f"{key}.{self.keys[0]}" if self.keys[0] else key
        rules = tuple(rule.below(f"{key}.") for rule in self.rules)
        return replace(self, rules=rules, keys=(source, self.keys[1]))

    def is_beside(self, name: str) -> bool:
        """Return whether a tensor of the source is none of the model, which is below a key."""
        return bool(self.keys[0]) and not name.startswith(f"{self.keys[0]}.")

    def require_invertible(self, sources: Sequence[MapSource], tensors: Iterable[MappedTensor]) -> None:
        """Raise PlanError where a load of ``tensors`` through `inverse` would not give ``sources``; found
        out once for the same ones."""
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
                f"{back.name} does not lead back to {listed(lost, most=_MAX_LISTED)}: what is saved through "
                "the map could not be restored",
                fqns=lost[:_MAX_LISTED],
            )
        self._inverted.add(structure)

    @cached_property
    def _inverted(self) -> set[int]:
        """The structures for which `require_invertible` was met."""
        return set()

    def apply(
        self,
        tensors: Iterable[MapSource],
        *,
        is_whole: bool = False,
        is_part: bool = False,
        names: Container[str] | None = None,
    ) -> list[MappedTensor]:
        """Return the target's tensors, in the order of the source's.

        PlanError that names all that is wrong: tensors that no rule knows, parts that are missing, shapes
        that do not fit, names that would be there twice; and of ``is_whole`` models layers that are missing.
        ``is_part``: of what is stacked there may be more elsewhere, as many as the map says there are.
        ``names`` are those of all tensors of the source, where ``tensors`` are not all of them.
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
                        raise PlanError("too many tensors would be made")
                    if tensor.name in mapped:
                        problems.append(f"{tensor.name!r} would be there twice, also by {rule.label}")
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
            return ". Say which model it is: config, its config.json, or the sizes themselves"
        if unknown and all(map(self.inverse.knows, unknown)):
            return ". The map's other way knows them: is it the wrong way round (inverse)?"
        for key in dict.fromkeys(name.partition(".")[0] for name in unknown):
            if any(
                self.knows(name.removeprefix(f"{key}.")) for name in unknown if name.startswith(f"{key}.")
            ):
                return f". It would know what is below {key!r}: say so (below), and choose that alone (only)"
        return ". What no rule knows can be left out (only, exclude)" if unknown else ""

    def _describe_unknown(self, name: str) -> str:
        """Return the reason for which no rule takes a name."""
        found = ((rule, rule.match(name)) for rule in self._used if rule.present is not None)
        shown = [repr(rule.present.format(met[1])) for rule, met in found if met and rule.present is not None]
        if shown:
            return f"which rule is for {name!r} is not known: there is no {' and no '.join(shown)}"
        return f"no rule knows {name!r}"

    def _check_counted(self, rule: MapRule, known: Mapping[str, int]) -> None:
        """Raise PlanError where the map says of what ``rule`` stacks how many there are, and that is not
        known: the last of them may be missing."""
        for part in sorted(rule.stacked - known.keys()):
            if (said := rule.sizes.get(part, self.sizes.get(part))) is not None:
                raise PlanError(f"how many there are of {part} ({said}) is not known")

    def _uncounted(self, numbers: Mapping[str, Mapping[_Parts, set[int]]]) -> Iterator[str]:
        """Yield the missing numbers of parts of names, where anything is there: of layers, and of the
        experts of each layer that has any."""
        for part, count in self._evaluated(self.counts).items():
            for before, there in numbers[part].items() if count <= _MAX_RULES else ():
                if missing := sorted(set(range(count)) - there):
                    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                    where = "".join(f", {name} {text}" for name, text in before)
                    yield (
                        f"there should be {count} of {part} ({self.counts[part]}){where}: {missing[0]}{more} "
                        "missing"
                    )

    def knows(self, name: str) -> bool:
        """Return whether a rule takes the source's tensors of this name."""
        return self._met(name) is not None

    @cached_property
    def _used(self) -> list[MapRule]:
        return [rule for rule in self.rules if rule.when is None or evaluate(rule.when, self.config)]

    @cached_property
    def _by_name(self) -> dict[str, int]:
        """The first rule of each name in which nothing varies: a map of plain names has thousands."""
        named: dict[str, int] = {}
        for number, rule in enumerate(self._used):
            for pattern in rule.sources:
                if not pattern.name.parts and rule.present is None:
                    named.setdefault(pattern.name.text, number)
        return named

    @cached_property
    def _varying(self) -> list[int]:
        """The other rules."""
        rules = enumerate(self._used)
        return [n for n, rule in rules if rule.present or any(own.name.parts for own in rule.sources)]

    def _met(self, name: str, names: Container[str] | None = None) -> tuple[int, int, dict[str, str]] | None:
        """Return the first rule that knows a name, which of its sources that is, and the varying parts;
        where ``names`` are given, of rules beside whose tensors is what has to be."""
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
    """Make a map from one model definition's weights to another's, for `dcp.convert` and the like.

    Args:
        source: The name of a ready map, as "llama:hf-to-titan"; a TOML or JSON file; its data; or a map, as
            that of `dcp.transformers_map`.
        config: What the map's expressions are about: a model's ``config.json``, or its content.
        inverse: The other way.
        below: The key that the source has the model below, as "model" of a training state.
        **sizes: Numbers that go before those of ``config``, by its names, and those of the map, by axis.

    Raises:
        OptionError: It is no map, or no configuration.
    """
    found = WeightMap.of(source)
    if config is not None:
        found = found.with_config(config if isinstance(config, Mapping) else config_at(Path(config)))
    found = found.with_numbers(sizes)
    found = found.inverse if inverse else found
    return found.below(below) if below else found


def ready_maps() -> dict[str, Path]:
    """Return the maps that come with the package, by name."""
    found = {}
    for path in sorted(_READY.glob("*.toml")):
        family, _, way = path.stem.partition(".")
        found[f"{family}:{way}"] = path
    return found


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"a weight map is TOML or JSON: {error}") from None
    if not isinstance(found, Mapping):
        raise OptionError("a weight map is a table")
    return found


def _rule(given: Any, where: str) -> MapRule:
    if not isinstance(given, Mapping):
        raise OptionError(f"{where} is no table")
    _check_keys(given, _RULE_KEYS, where)
    when = given.get("when")
    if when is not None and not isinstance(when, str):
        raise OptionError(f"{where}: when is an expression")
    beside = [given.get(key) for key in ("present", "present_back")]
    if not all(isinstance(name, str | None) for name in beside):
        raise OptionError(f"{where}: present is the name of a tensor")
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
        raise OptionError("from and to are a name, or names with their axes")
    patterns = []
    for name, axes in given.items():
        if not isinstance(axes, str):
            raise OptionError(f"the axes of {name!r} are a text")
        patterns.append(Pattern(NamePattern.parse(name), Axes.parse(axes)))
    return tuple(patterns)


def _sizes(given: Any, where: str) -> dict[str, str | int]:
    if not isinstance(given, Mapping):
        raise OptionError(f"{where}: sizes are by axis")
    for name, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int | str):
            raise OptionError(f"{where}: the size of {name} is a whole number or an expression")
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
        raise OptionError(f"{where} is a list of texts")
    return list(given)


def _check_keys(given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    for key in given:
        if key not in known:
            near = close_to(str(key), sorted(known))
            raise OptionError(f"{where} has no {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))

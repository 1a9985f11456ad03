"""Retention: rules for checkpoints to keep, and the plan of deletions.

A step is kept if any rule keeps it. Pinned steps, steps awaiting verification and the newest good step always
stay. Rules count good steps only, not damaged or partial ones. A rule that cannot be evaluated keeps all
steps.

Rules for a part, such as the optimizer, apply to kept steps that still have the part. This module has no I/O
and does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import fields as fields_of
from typing import Any, Final, Literal, NamedTuple, Self, cast

from dcp.steps import StepState, patterns_of_part
from dcp.storage.errors import OptionError
from dcp.storage.near_names import close_to

_MODES: Final = ("min", "max")
_RULES: Final = ("last", "every_steps", "best", "younger_than_seconds")


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the best ``count`` steps by ``metric``.

    Steps without a finite value do not count. While no step has a finite value, all steps are kept, in case
    the name is misspelt or the metric comes later.

    Attributes:
        metric: Name of a metric given to `CheckpointManager.save`.
        count: Number of steps.
        mode: "min" or "max". Of equal values, the newer step is better.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if type(self.metric) is not str or not self.metric:
            raise OptionError(f"best.metric: must be the name of a metric, not {self.metric!r}")
        _check_count("best.count", self.count)
        if self.mode not in _MODES:
            raise OptionError(f"best.mode: must be 'min' or 'max', not {self.mode!r}")

    def pick(self, steps: Iterable[StepState]) -> list[int]:
        """Return the best of ``steps``, best first."""
        sign = 1.0 if self.mode == "min" else -1.0
        known = [(state, state.metrics.get(self.metric, math.nan)) for state in steps]
        ranked = sorted((sign * value, -state.step) for state, value in known if math.isfinite(value))
        return [-negative for _, negative in ranked[: self.count]]


@dataclass(frozen=True, slots=True)
class Keep:
    """Rules for steps to keep. At least one rule is required; any rule can keep a step.

    Attributes:
        last: Keep this number of newest steps.
        every_steps: Keep multiples of this number.
        best: Keep the best steps by one or several metrics.
        younger_than_seconds: Keep steps committed within this time; an unknown time counts as recent.

    Raises:
        OptionError: A rule is invalid; the message names the field.
    """

    last: int | None = None
    every_steps: int | None = None
    best: Best | Sequence[Best] | None = None
    younger_than_seconds: float | None = None

    def __post_init__(self) -> None:
        best = self.best
        if best is not None:
            best = (best,) if isinstance(best, Best) else best
            if not isinstance(best, Sequence) or not all(isinstance(rule, Best) for rule in best):
                raise OptionError(f"best: must be a Best or a sequence of them, not {best!r}")
            object.__setattr__(self, "best", tuple(best) or None)
        for name in ("last", "every_steps"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        young = self.younger_than_seconds
        if young is not None and (type(young) not in (int, float) or not math.isfinite(young) or young <= 0):
            raise OptionError(f"younger_than_seconds: must be a number above 0, not {young!r}")
        if not isinstance(self, Retention) and not self.has_rules:
            raise OptionError("Keep: give at least one of last, every_steps, best and younger_than_seconds")

    @property
    def has_rules(self) -> bool:
        """True if a rule is given."""
        return any(getattr(self, name) is not None for name in _RULES)

    @property
    def bests(self) -> tuple[Best, ...]:
        """The rules of ``best``, always as a tuple."""
        return cast("tuple[Best, ...]", self.best or ())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read rules from plain data, such as YAML or JSON.

        ``best`` is a map or a list of maps, ``optimizer`` a map of rules, and ``parts`` a map of maps of
        rules.
        """
        fields = _known(data, cls.__name__, [each.name for each in fields_of(cls)])
        best, optimizer, parts = map(fields.get, ("best", "optimizer", "parts"))
        if best is not None:
            if not isinstance(best, (Mapping, list, tuple)):
                raise OptionError(f"best: must be a map or a list of maps, not {best!r}")
            fields["best"] = [_best_of(rule) for rule in ([best] if isinstance(best, Mapping) else best)]
        if optimizer is not None:
            fields["optimizer"] = Keep.from_dict(optimizer)
        if parts is not None:
            if not isinstance(parts, Mapping):
                raise OptionError(f"parts: must be a map of maps, not {parts!r}")
            fields["parts"] = {name: Keep.from_dict(rules) for name, rules in parts.items()}
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `from_dict`, without unset rules."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


class Part(NamedTuple):
    """Part of a state: its ``name``, patterns of its entries, and the rule for steps that keep it."""

    name: str
    patterns: tuple[str, ...]
    keep: Keep | None = None

    def is_gone(self, state: StepState) -> bool:
        """Return whether the part was dropped from a step."""
        return state.dropped.issuperset(self.patterns)


def part_named(name: str, keep: Keep | None = None) -> Part:
    """Return the part called ``name``: "optimizer", or a shell pattern on names of entries."""
    return Part(name, patterns_of_part(name), keep)


@dataclass(frozen=True, slots=True)
class Retention(Keep):
    """Rules for steps and parts to keep. At least one rule is required.

    A step is kept if a rule of `Keep` keeps it; without such a rule, all steps are kept. The newest good step
    and pinned steps keep all parts.

    Attributes:
        optimizer: Rule for steps that keep their optimizer: entries below ``state`` and ``param_groups``
            under a key that begins with ``optim``.
        parts: Rules for other parts, by shell patterns on names: ``{"ema.*": dcp.Keep(last=1)}``.

    Raises:
        OptionError: A rule is invalid; the message names the field.

    Examples:
        ```python
        keep = dcp.Retention(last=3, every_steps=1000, best=dcp.Best("loss"), optimizer=dcp.Keep(last=2))
        ```
    """

    optimizer: Keep | None = None
    parts: Mapping[str, Keep] | None = None

    def __post_init__(self) -> None:
        Keep.__post_init__(self)
        if self.optimizer is not None and type(self.optimizer) is not Keep:
            raise OptionError(f"optimizer: must be a Keep, such as Keep(last=2), not {self.optimizer!r}")
        parts = {} if self.parts is None else self.parts
        if not isinstance(parts, Mapping) or not all(type(name) is str and name for name in parts):
            raise OptionError(f"parts: must be a map from globs on names to Keep, not {parts!r}")
        for name, keep in parts.items():
            if type(keep) is not Keep:
                raise OptionError(f"parts[{name!r}]: must be a Keep, such as Keep(last=2), not {keep!r}")
        object.__setattr__(self, "parts", dict(parts) or None)
        if not self.has_rules and not self.dropping:
            raise OptionError(
                "Retention: give at least one of last, every_steps, best and younger_than_seconds, or rules "
                "for a part, such as optimizer=dcp.Keep(last=2); to keep all checkpoints, give no Retention"
            )

    @property
    def dropping(self) -> tuple[Part, ...]:
        """The parts with rules of their own."""
        named = [] if self.optimizer is None else [part_named("optimizer", self.optimizer)]
        return (*named, *(Part(glob, (glob,), keep) for glob, keep in (self.parts or {}).items()))


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps to keep, with all reasons, and steps to delete, oldest first.

    Attributes:
        newest: Good step that is kept regardless of rules.
        unjudged: For each metric, a message about rules that could not be evaluated and alone keep steps.
        drop: Parts to drop from kept steps, oldest first. A step may lack a listed part.
    """

    keep: Mapping[int, tuple[str, ...]]
    delete: tuple[int, ...]
    unjudged: Mapping[str, str] = field(default_factory=dict)
    newest: int | None = None
    drop: Mapping[int, tuple[Part, ...]] = field(default_factory=dict)


def plan(retention: Keep | None, steps: Iterable[StepState], now_seconds: float) -> Plan:
    """Apply ``retention`` (None keeps all) to the committed ``steps``.

    A damaged or partial step is deleted once ``last`` good steps (one without that rule) are newer. Until
    then the step may be the only one, or may verify after the storage has recovered.
    """
    states = sorted(steps, key=lambda state: state.step)
    reasons: dict[int, list[str]] = {state.step: [] for state in states}
    good = [state for state in states if state.health == "good"]
    newest = good[-1].step if good else None
    if newest is not None:
        reasons[newest].append("newest")
    for state in states:
        if state.pinned:
            reasons[state.step].append("pinned")
        if state.health == "pending":
            reasons[state.step].append("pending")
        if retention is None or not retention.has_rules:
            reasons[state.step].append("no retention")
    unjudged: dict[str, str] = {}
    if retention is not None and retention.has_rules:
        unjudged = _apply(retention, good, now_seconds, reasons)
        newer = 0
        for state in reversed(states):
            if state.health in ("damaged", "partial") and newer < (retention.last or 1):
                reasons[state.step].append(f"{state.health}, without enough good checkpoints after it")
            newer += state.health == "good"
    keep = {step: tuple(why) for step, why in reasons.items() if why}
    drop: dict[int, tuple[Part, ...]] = {}
    for part in retention.dropping if isinstance(retention, Retention) else ():
        # deleted steps, and steps without the part, do not count for the part's rule
        having = [state for state in good if state.step in keep and not part.is_gone(state)]
        planned = plan(part.keep, having, now_seconds)
        unjudged |= planned.unjudged
        drop |= {step: (*drop.get(step, ()), part) for step in planned.delete}
    gone = tuple(step for step, why in reasons.items() if not why)
    return Plan(keep, gone, unjudged, newest, dict(sorted(drop.items())))


def _apply(
    retention: Keep, good: Sequence[StepState], now_seconds: float, reasons: dict[int, list[str]]
) -> dict[str, str]:
    """Add ``reasons`` to keep ``good`` steps, and return messages by metric for rules that could not be
    evaluated.
    """
    if retention.last is not None:
        for state in good[-retention.last :]:
            reasons[state.step].append(f"last {retention.last}")
    blind = []
    for rule in retention.bests:
        picked = rule.pick(good)
        for step in picked:
            reasons[step].append(f"best {rule.metric} ({rule.mode})")
        blind += [] if picked else [rule]
    every, young = retention.every_steps, retention.younger_than_seconds
    for state in good:
        if every is not None and state.step % every == 0:
            reasons[state.step].append(f"every {every} steps")
        committed = state.committed_seconds  # 0 if the storage has no time
        if young is not None and (committed is None or not 0 < committed <= now_seconds - young):
            reasons[state.step].append(f"younger than {young:g} s")
    alone = not all(reasons[state.step] for state in good)
    for rule in blind:
        for state in good:
            reasons[state.step].append(f"best {rule.metric} ({rule.mode}), which cannot be compared")
    return {rule.metric: _unjudged(rule, good) for rule in blind if alone}


def _unjudged(rule: Best, good: Sequence[StepState]) -> str:
    return f"the best steps are unknown, so all steps are kept: {why_no_best(rule, good)}"


def why_no_best(rule: Best, steps: Sequence[StepState]) -> str:
    """Return why ``rule`` picks none of ``steps``, with similar names of metrics."""
    names = sorted({name for state in steps for name in state.metrics})
    near = close_to(rule.metric, names, most=1)
    if rule.metric in names:
        return f"the metric {rule.metric!r} is NaN or infinite in every step"
    if near:
        return f"no step has the metric {rule.metric!r}; did you mean {near[0]!r}?"
    known = f"; they have {', '.join(map(repr, names[:8]))}" if names else ""
    return f"no step has the metric {rule.metric!r}{known}"


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise OptionError(f"{name}: must be a whole number of at least 1, not {value!r}")


def _plain(value: Any) -> Any:
    """Return rules without unset fields, with lists instead of tuples."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _best_of(data: Any) -> Best:
    fields = _known(data, "best", ("metric", "count", "mode"))
    if "metric" not in fields:
        raise OptionError("best.metric is missing: pass the name of a metric")
    return Best(**fields)


def _known(data: Any, what: str, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise OptionError(f"{what}: must be a map, not {data!r}")
    unknown = [name for name in data if name not in names]
    if unknown:
        raise OptionError(f"{what}: unknown field {unknown[0]!r}; known are {', '.join(names)}")
    return dict(data)

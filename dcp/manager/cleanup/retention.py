"""Which checkpoints to keep: rules as data, and the plan that follows from them.

A step is kept if any rule keeps it. Whatever the rules, pinned steps, steps whose verification is pending,
and the newest good step are kept. Only good steps count for a rule: a damaged one, or one that is not the
whole state, must not push a good one out. A rule that cannot be judged deletes nothing: it keeps all. Pure:
no I/O, no clock, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from dcp.storage.errors import OptionError
from dcp.storage.near_names import close_to

__all__ = ["Best", "Health", "Plan", "Retention", "StepState", "plan"]

Health = Literal["good", "pending", "damaged", "partial"]
"""Of a committed step: to be counted on; being verified or replaced; known not to load as committed; saved
before a deadline, and not the whole state."""

_MODES: Final = ("min", "max")


@dataclass(frozen=True, slots=True)
class StepState:
    """What retention has to know of a committed step; ``committed_seconds`` counts from the epoch."""

    step: int
    committed_seconds: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    health: Health = "good"
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the ``count`` best steps by ``metric``.

    "min": the lowest are the best. Of equal ones the newer is the better. Steps without the metric, or where
    it is NaN or infinite, are never among them; but as long as no step has a finite one, all steps are kept:
    the metric may be misspelt, or come later.
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
        """The best of ``steps``, the best one first."""
        sign = 1.0 if self.mode == "min" else -1.0
        known = [(state, state.metrics.get(self.metric, math.nan)) for state in steps]
        ranked = sorted((sign * value, -state.step) for state, value in known if math.isfinite(value))
        return [-negative for _, negative in ranked[: self.count]]


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for what to keep; at least one. A step is kept if any of them keeps it.

    - ``last``: the newest n.
    - ``every_steps``: steps that are multiples of it, for ever.
    - ``best``: by one metric or several; a tuple once constructed. All steps, until one has the metric.
    - ``younger_than_seconds``: by the time of the commit; one that is not known counts as young.

    Raises OptionError, which names the field.
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
        if (self.last, self.every_steps, self.best, young) == (None, None, None, None):
            raise OptionError(
                "Retention: give at least one of last, every_steps, best and younger_than_seconds; to keep "
                "all checkpoints, give no Retention"
            )

    @property
    def bests(self) -> tuple[Best, ...]:
        """The rules of ``best``, always as a tuple."""
        return cast("tuple[Best, ...]", self.best or ())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Retention:
        """The rules written as plain data (YAML, JSON); ``best`` is a map or a list of maps."""
        fields = _known(data, "Retention", ("last", "every_steps", "best", "younger_than_seconds"))
        best = fields.get("best")
        if best is not None:
            if not isinstance(best, (Mapping, list, tuple)):
                raise OptionError(f"best: must be a map or a list of maps, not {best!r}")
            rules = [best] if isinstance(best, Mapping) else best
            fields["best"] = [_best_of(rule) for rule in rules]
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads; rules that are not set are left out."""
        fields: dict[str, Any] = {"last": self.last, "every_steps": self.every_steps}
        if self.bests:
            fields["best"] = [
                {"metric": rule.metric, "count": rule.count, "mode": rule.mode} for rule in self.bests
            ]
        fields["younger_than_seconds"] = self.younger_than_seconds
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is kept, by step and with all reasons, and what is to be deleted, oldest first.

    ``newest`` is the good step that is kept whatever the rules. ``unjudged``: by metric, a sentence on the
    rules that could not be judged, where they alone keep steps.
    """

    keep: Mapping[int, tuple[str, ...]]
    delete: tuple[int, ...]
    unjudged: Mapping[str, str] = field(default_factory=dict)
    newest: int | None = None


def plan(retention: Retention | None, steps: Iterable[StepState], now_seconds: float) -> Plan:
    """What ``retention`` (None keeps all) makes of committed ``steps``, each given once.

    A damaged or partial step goes once ``last`` good ones (one, without that rule) are newer than it: it is
    no loss then, and until then it may be all there is, or verify after the storage has recovered.
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
        if retention is None:
            reasons[state.step].append("no retention")
    unjudged: dict[str, str] = {}
    if retention is not None:
        _apply(retention, good, now_seconds, reasons)
        unjudged = _spare_unjudged(retention, good, reasons)
        _spare_unsound(retention, states, reasons)
    keep = {step: tuple(why) for step, why in reasons.items() if why}
    return Plan(keep, tuple(step for step, why in reasons.items() if not why), unjudged, newest)


def _apply(
    retention: Retention, good: Sequence[StepState], now_seconds: float, reasons: dict[int, list[str]]
) -> None:
    if retention.last is not None:
        for state in good[-retention.last :]:
            reasons[state.step].append(f"last {retention.last}")
    for rule in retention.bests:
        for step in rule.pick(good):
            reasons[step].append(f"best {rule.metric} ({rule.mode})")
    every, young = retention.every_steps, retention.younger_than_seconds
    for state in good:
        if every is not None and state.step % every == 0:
            reasons[state.step].append(f"every {every} steps")
        if young is not None and _is_young(state.committed_seconds, now_seconds - young):
            reasons[state.step].append(f"younger than {young:g} s")


def _is_young(committed: float | None, since_seconds: float) -> bool:
    # Storages that know no time say 0.
    return committed is None or not 0 < committed <= since_seconds


def _spare_unjudged(
    retention: Retention, good: Sequence[StepState], reasons: dict[int, list[str]]
) -> dict[str, str]:
    """Keep ``good`` where a rule has nothing to go by; a sentence on each metric that has spared one."""
    told = {}
    spared = [state.step for state in good if not reasons[state.step]]
    for rule in retention.bests:
        if rule.pick(good):
            continue
        for state in good:
            reasons[state.step].append(f"best {rule.metric} ({rule.mode}), which cannot be judged")
        if spared:
            told[rule.metric] = _unjudged(rule, good)
    return told


def _unjudged(rule: Best, good: Sequence[StepState]) -> str:
    names = sorted({name for state in good for name in state.metrics})
    near = close_to(rule.metric, names, most=1)
    if rule.metric in names:
        why = f"the metric {rule.metric!r} is NaN or infinite in every step"
    elif near:
        why = f"no step has the metric {rule.metric!r}; did you mean {near[0]!r}?"
    else:
        known = f"; they have {', '.join(map(repr, names[:8]))}" if names else ""
        why = f"no step has the metric {rule.metric!r}{known}"
    return f"what is best cannot be judged, so all steps are kept: {why}"


def _spare_unsound(retention: Retention, states: Sequence[StepState], reasons: dict[int, list[str]]) -> None:
    enough = retention.last or 1
    newer = 0
    for state in reversed(states):
        if state.health in ("damaged", "partial") and newer < enough:
            reasons[state.step].append(f"{state.health}, without enough good ones after it")
        newer += state.health == "good"


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise OptionError(f"{name}: must be a whole number of at least 1, not {value!r}")


def _best_of(data: Any) -> Best:
    fields = _known(data, "best", ("metric", "count", "mode"))
    if "metric" not in fields:
        raise OptionError("best.metric: is missing")
    return Best(**fields)


def _known(data: Any, what: str, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise OptionError(f"{what}: must be a map, not {data!r}")
    unknown = [name for name in data if name not in names]
    if unknown:
        raise OptionError(f"{what}: unknown field {unknown[0]!r}; known are {', '.join(names)}")
    return dict(data)

"""What does not fit between a state dict and a checkpoint, as one error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dcp.storage.errors import DtypeMismatchError, MissingKeyError, PlanError, ShapeMismatchError
from dcp.storage.near_names import listed

__all__ = ["MAX_LISTED", "LoadProblems"]

MAX_LISTED: Final = 20
"""Names in the facts of one error; the rest is counted."""

_SHOWN: Final = 3
"""Problems of a kind in the message."""

_ADVICE: Final[Mapping[type[PlanError], str]] = {
    ShapeMismatchError: "Build the state dict with the shapes that were saved.",
    DtypeMismatchError: 'To convert while loading: dtype="cast".',
}

_PER_RANK_ADVICE: Final = (
    "Some of these are PerRank values, which each rank has of its own: where another number of ranks saved "
    'them, per_rank="keep" leaves them as they are.'
)


@dataclass
class LoadProblems:
    """What is wrong, by kind: each maps names of the state dict to the text about them.

    ``missing`` maps them to the name as it is shown. Messages have the words in which stock torch says the
    same, since programs look for them.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    lacks_per_rank: bool = False

    def raise_any(self, hint_for_missing: Callable[[], str]) -> None:
        """Raise one error for all problems, if there are any: of their own class where they are of one
        kind, else a PlanError."""
        kinds: list[tuple[type[PlanError], Mapping[str, str]]] = [
            (MissingKeyError, self.missing),
            (ShapeMismatchError, self.shapes),
            (DtypeMismatchError, self.dtypes),
            (PlanError, self.others),
        ]
        found = [(cls, problems) for cls, problems in kinds if problems]
        if not found:
            return
        lines = [_said(cls, list(problems.values())) for cls, problems in found]
        if len(found) > 1:
            count = sum(len(problems) for _, problems in found)
            lines.insert(0, f"the checkpoint does not fit the state dict, {count} problems:")
        if self.missing:
            lines[-len(found)] = "\n".join(filter(None, [lines[-len(found)], hint_for_missing()]))
        advice = [_ADVICE[cls] for cls, _ in found if cls in _ADVICE]
        if self.lacks_per_rank:
            advice.append(_PER_RANK_ADVICE)
        if advice:
            lines.append(" ".join(advice))
        cls = found[0][0] if len(found) == 1 else PlanError
        raise cls(
            "\n".join(lines),
            problems=[text for cls, problems in found for text in _each(cls, problems)][:MAX_LISTED],
            fqns=[fqn for _, problems in found for fqn in problems][:MAX_LISTED],
        )


def _said(cls: type[PlanError], told: Sequence[str]) -> str:
    if cls is MissingKeyError:
        return f"Missing key in checkpoint state_dict: {listed(told, most=_SHOWN, show=str)}."
    more = f"; and {len(told) - _SHOWN:,} more" if len(told) > _SHOWN else ""
    return f"{'; '.join(told[:_SHOWN])}{more}."


def _each(cls: type[PlanError], problems: Mapping[str, str]) -> Sequence[str]:
    if cls is MissingKeyError:
        return [f"{told} is not in the checkpoint" for told in problems.values()]
    return list(problems.values())

"""Findings of `dcp.prove`. Without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["FindingKind", "Proof", "ProofFinding", "RankProof"]

FindingKind = Literal[
    "missing", "unexpected", "dtype", "shape", "tensor", "incomplete", "overlap", "value", "undecided"
]


@dataclass(frozen=True, slots=True)
class ProofFinding:
    """One entry that is not what was saved.

    ``kind``: "missing" in the state, or "unexpected" there; another "dtype" or "shape"; "tensor": other
    bytes; "incomplete": the ranks do not have all of it; "overlap": an element is in two parts; "value":
    another value; "undecided": its pickle differs, and only code that is not trusted would tell more.
    ``ranks`` are those that have it so; none if it is of all.
    """

    kind: FindingKind
    fqn: str
    message: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RankProof:
    """The holdings of a rank: tensors, bytes of its parts of them, values; ``differing`` names its
    findings."""

    rank: int
    tensors: int
    bytes: int
    values: int
    seconds: float
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """Equal names, dtypes, shapes, bytes and values (``ok``), or what differs; the same on all ranks.

    ``tensors`` and ``values`` were compared, and are equal but for ``findings``. ``bytes_read`` of the
    checkpoint beside its index: 0 if its manifest has digests and nothing differs. ``left`` names entries of
    ranks that are not there any more, which no state can have.
    """

    checkpoint: str
    save_id: str | None
    world_size: int
    tensors: int
    values: int
    bytes: int
    bytes_read: int
    findings: tuple[ProofFinding, ...]
    left: tuple[str, ...]
    ranks: tuple[RankProof, ...]

    @property
    def ok(self) -> bool:
        """Return whether all is as it was saved."""
        return not self.findings

    def to_json(self) -> str:
        """Return all of it, to be kept beside a run."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    @classmethod
    def of_json(cls, text: str) -> Proof:
        """Return the inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        del fields["ok"]
        fields["findings"] = tuple(
            ProofFinding(**finding | {"ranks": tuple(finding["ranks"])}) for finding in fields["findings"]
        )
        fields["ranks"] = tuple(
            RankProof(**share | {"differing": tuple(share["differing"])}) for share in fields["ranks"]
        )
        return cls(**fields | {"left": tuple(fields["left"])})

"""Agreement of all ranks on the operation: the first step (`begin`) of each operation.

Ranks in different operations would take different steps, wait until the timeout, or mix up messages.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgpack

from dcp.ranks.collectives import Ranks
from dcp.ranks.failures import RankFailedError, failure_of
from dcp.storage.errors import PlanError

logger = logging.getLogger(__name__)

_MAX_VALUE = 1000
"""Maximum length of an option in a message; longer ones are cut and get a digest."""

_warned: set[str] = set()
"""Names of notes known to differ by rank, and omitted from later exchanges so that digests are equal."""


def begin(
    ranks: Ranks,
    place: Callable[[], str],
    *,
    manner: Sequence[str] = (),
    options: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    kinds: Callable[[], Mapping[str, str]] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Compare the operation on all ranks and return the result of ``place`` (the checkpoint id) on each rank.

    Ids may differ, because mounts may have different names. ``manner`` selects the steps of the operation.
    ``options`` must be equal on all ranks. ``kinds`` are the types by key; keys may differ. Of ``notes``, the
    coordinator's are kept, with a warning for a difference. Raises PlanError on all ranks for different
    operations, manners, options or kinds, and errors of ``place`` on any rank.
    """

    def part() -> bytes:
        if ranks.world_size == 1:
            return place().encode("utf-8", "surrogatepass")
        given = options() if callable(options) else options or {}
        shown = {name: _shown(value) for name, value in given.items()}
        found = dict(kinds()) if kinds is not None else {}
        own = ranks.operation, ", ".join(manner), place(), shown, found, _shown_notes(notes or {})
        return bytes(msgpack.packb(own, unicode_errors="surrogatepass"))

    found = ranks.all_gather("begin", part, alike=True)
    if ranks.world_size == 1:
        return (found[0].decode("utf-8", "surrogatepass"),)
    parts = [msgpack.unpackb(data, unicode_errors="surrogatepass") for data in found]
    own = parts[ranks.coordinator]
    if any(part != own for part in parts):  # usually equal, and possibly large
        *facts, noted = zip(*parts, strict=True)
        _check_alike(ranks, *facts)
        _warn_of_notes(ranks, noted)
    return tuple(part[2] for part in parts)


def _shown(value: Any) -> str:
    text = repr(value)
    if len(text) <= _MAX_VALUE:
        return text
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{text[:_MAX_VALUE]}... ({digest})"


def _shown_notes(notes: Mapping[str, Any]) -> dict[str, str]:
    """Return notes by flat name, without those already warned about."""
    shown = {}
    for name, value in notes.items():
        for key, one in value.items() if isinstance(value, Mapping) else [(None, value)]:
            shown[name if key is None else f"{name}[{key!r}]"] = _shown(one)
    return {name: text for name, text in shown.items() if name not in _warned}


def _warn_of_notes(ranks: Ranks, noted: Sequence[Mapping[str, str]]) -> None:
    for name in dict.fromkeys(name for own in noted for name in own):
        values = [own.get(name, "not given") for own in noted]
        if len(set(values)) > 1:
            _warned.add(name)
            if ranks.is_coordinator:
                logger.warning(
                    "%s, in the metadata of the save, differs by rank, and the value of rank %d is stored: "
                    "%s. Reduce the value over the ranks, or save a value for each rank (dcp.PerRank)",
                    name,
                    ranks.rank,
                    by_rank(values),
                )


def _check_alike(
    ranks: Ranks,
    operations: Sequence[str],
    manners: Sequence[str],
    places: Sequence[str],
    options: Sequence[Mapping[str, str]],
    kinds: Sequence[Mapping[str, str]],
) -> None:
    """Raise PlanError on all ranks for operations, manners, places or options (given by rank) that differ."""
    what, advice = "called different operations", "All ranks of a process group must call the same function"
    if len(set(operations)) == 1:
        what = f"{ranks.operation} in different ways"
        advice = "Pass the same options, and the same classes of planner and storage, on all ranks"
    pairs = [*zip(operations, manners, strict=True)]
    odd = [rank for rank, pair in enumerate(pairs) if pair != pairs[ranks.coordinator]]
    calls = [
        f"{operation}{f' {place}' if place else ''}{f' ({manner})' if manner else ''}"
        for (operation, manner), place in zip(pairs, places, strict=True)
    ]
    refuse_odd(ranks, "begin", odd, f"the ranks {what}: {by_rank(calls)}. {advice}.")
    for name in dict.fromkeys(name for own in options for name in own):
        values = [f"{name}={own.get(name, 'not given')}" for own in options]
        what = f"the option {name!r} is not the same on all ranks"
        _check_same(ranks, values, what, "Pass the same value on all ranks")
    for key in dict.fromkeys(key for own in kinds for key in own):
        values = [own.get(key, "") for own in kinds]
        what = f"{key!r} does not have the same type on all ranks"
        advice = "Use the same type on all ranks, or omit the key on ranks without a value"
        _check_same(ranks, values, what, advice, fqns=[key])


def _check_same(ranks: Ranks, texts: Sequence[str], what: str, advice: str, **facts: Any) -> None:
    """Raise PlanError for different texts; empty texts do not count."""
    common = texts[ranks.coordinator] or next(filter(None, texts), "")
    odd = [rank for rank, text in enumerate(texts) if text not in ("", common)]
    if odd:
        refuse_odd(ranks, "begin", odd, f"{what}: {by_rank(texts)}. {advice}", **facts)


def refuse_odd(ranks: Ranks, step: str, odd: Sequence[int], text: str, **facts: Any) -> None:
    """Raise PlanError on all ranks if ``odd`` has ranks."""
    if odd:
        error = PlanError(text, ranks=[*odd], **facts)
        raise failure_of(step, dict.fromkeys(odd, error), ranks.rank, None)


@contextlib.contextmanager
def raise_on_all_ranks(ranks: Ranks) -> Iterator[None]:
    """Raise an exception of this block on all ranks, in their `begin`.

    If all ranks fail, each raises its own exception.
    """
    try:
        yield
    except Exception as error:
        own = error
        if ranks.world_size > 1:

            def fail() -> str:
                raise own

            try:
                begin(ranks, fail)
            except RankFailedError as failure:
                if len(failure.ranks) < ranks.world_size:
                    raise
        raise


def check_same_checkpoint(ranks: Ranks, places: Sequence[str], fingerprint: Callable[[], bytes]) -> None:
    """Raise PlanError on all ranks unless they load the same checkpoint.

    ``places`` are the ids from `begin`. ``fingerprint`` identifies the checkpoint and is compared only if ids
    differ.
    """
    if len(set(places)) > 1:
        prints = ranks.all_gather("compare", fingerprint, alike=True)
        odd = [rank for rank, found in enumerate(prints) if found != prints[ranks.coordinator]]
        text = f"the ranks load different checkpoints: {by_rank(places)}. Pass one checkpoint_id on all ranks"
        refuse_odd(ranks, "compare", odd, text)


def by_rank(texts: Sequence[str]) -> str:
    """Describe which ranks have which of ``texts``, ordered by rank, with a limited length."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if not text:
            continue
        ranks_of.setdefault(text, []).append(rank)
    shown = []
    for text, ranks in [*ranks_of.items()][:6]:
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        shown.append(f"rank {', '.join(map(str, ranks[:4]))}{more}: {text}")
    more = f"; {len(ranks_of) - 6} others" if len(ranks_of) > 6 else ""
    return "; ".join(shown) + more

"""Records of checkpoints, runs and roots: columns of the catalog and fields of answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal

from dcp.server.records.declaring import (
    AnyOf,
    Found,
    Hidden,
    IsFormat,
    JoinedColumn,
    OneOf,
    OwnColumn,
    Shown,
    Within,
)

State = Literal["incomplete", "committed", "unreadable", "vanished", "deleted", "purged"]
"""incomplete (data without a commit), committed, unreadable (damaged or refused index), vanished (missing
without a deletion), deleted (restorable until ``purge_after``), purged (removed from storage)."""
Verdict = Literal["unverified", "good", "damaged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint with its labels. ``run`` is the key of the run, ``key`` the key of the checkpoint.

    ``etag`` identifies the version. ``dtypes`` maps dtypes to bytes; None if the structure is unknown.
    """

    id: Annotated[int, OwnColumn("id"), Shown("Number of the checkpoint in the catalog.")]
    root: Annotated[str, JoinedColumn("roots", "name"), Shown("Name of the root.")]
    run_id: Annotated[int, OwnColumn("reference", refers="runs.id"), Shown("The `id` of the run.")]
    run: Annotated[
        str, JoinedColumn("runs", "key"), Shown("Key of the folder of the checkpoint; empty: the root.")
    ]
    key: Annotated[str, OwnColumn("name"), Shown("Path of the checkpoint in the root.")]
    name: Annotated[str, OwnColumn("name"), Shown("Last part of the key.")]
    step: Annotated[
        int | None,
        OwnColumn("large"),
        Found("of the same content"),
        Within(least="min_step", most="max_step", column="step_order"),
        Shown("Training step; null: not recorded and not in the name."),
    ]
    format: Annotated[
        str, OwnColumn("code", 16), Found(), IsFormat(), AnyOf("format"), Shown("Format of the files.")
    ]
    state: Annotated[
        str,
        OwnColumn("code", 16),
        Found(),
        OneOf(State, is_checked=True),
        AnyOf("states"),
        Shown(
            "incomplete: data without a commit. unreadable: the index is damaged or refused. vanished: "
            "missing in storage without a deletion. deleted: can be restored until `purge_after`. purged: "
            "removed from storage."
        ),
    ]
    committed_at: Annotated[
        datetime,
        OwnColumn("seconds"),
        Found("of the same content"),
        Within(least="since", below="until"),
        Shown("Time of the commit."),
    ]
    discovered_at: Annotated[
        datetime, OwnColumn("seconds"), Shown("Time of the registration or of the first scan that found it.")
    ]
    updated_at: Annotated[datetime, OwnColumn("seconds"), Shown("Time of the last change in the catalog.")]
    deleted_at: Annotated[
        datetime | None, OwnColumn("seconds"), Shown("Time of the deletion in the catalog.")
    ] = None
    purge_after: Annotated[
        datetime | None, OwnColumn("seconds"), Shown("A deleted checkpoint can be restored until this time.")
    ] = None
    bytes: Annotated[int, OwnColumn("large", default=0), Found(), Shown("Size of all files.")]
    file_count: Annotated[int, OwnColumn("integer", default=0), Found()]
    world_size: Annotated[
        int | None,
        OwnColumn("integer"),
        Found("of the same content"),
        Shown("Number of ranks that saved it; null: unknown."),
    ]
    structure_id: Annotated[
        int | None,
        OwnColumn("reference", refers="structures.id"),
        Found("of the same content"),
        Shown("Checkpoints with equal names, shapes and dtypes have the same id."),
    ] = None
    dtypes: Annotated[
        Mapping[str, int] | None, JoinedColumn("structures", "dtypes"), Shown("Bytes by dtype.")
    ] = None
    verification: Annotated[
        str,
        OwnColumn("code", 16, default="unverified"),
        OneOf(Verdict, is_checked=True),
        AnyOf("verification"),
        Shown("Result of the last verification of this content."),
    ]
    verified_at: Annotated[datetime | None, OwnColumn("seconds"), Shown("Time of the last verification.")] = (
        None
    )
    problem: Annotated[
        str | None,
        OwnColumn("text"),
        Found(),
        Shown("The reason why the checkpoint is unreadable, or the findings of the verification."),
    ] = None
    is_pinned: Annotated[
        bool,
        OwnColumn("flag", default=False),
        Found("always"),
        AnyOf("pinned"),
        Shown("A pinned checkpoint cannot be deleted, by hand or by retention."),
    ]
    registered_by: Annotated[
        str | None,
        OwnColumn("code", 128),
        Found("the first"),
        AnyOf("registered_by"),
        Shown("The key or person that registered the checkpoint; null: found by a scan."),
    ] = None
    tags: tuple[str, ...] = ()
    aliases: Annotated[
        tuple[str, ...], Shown("Names that point to this checkpoint in its run, such as best.")
    ] = ()
    metrics: Annotated[Mapping[str, float], Shown("Finite metrics by name.")] = field(default_factory=dict)
    nonfinite_metrics: Annotated[
        Mapping[str, str],
        Shown('Metrics with the values "nan", "inf" or "-inf", which JSON cannot express as numbers.'),
    ] = field(default_factory=dict)
    partial: Annotated[tuple[str, ...], Shown("The saved parts of a partial save; empty: complete.")] = ()
    version: Annotated[int, OwnColumn("integer", default=1), Shown("Number that increases with each change.")]
    etag: Annotated[str, Shown("For If-Match.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDetail(Checkpoint):
    """A checkpoint with all known details. Fields of the structure are None if the structure is unknown."""

    save_id: Annotated[
        str | None,
        OwnColumn("code", 64),
        Found("of the same content"),
        Shown("Unique id that the writer gave the save; null: none recorded."),
    ] = None
    resumed_from: Annotated[
        str | None,
        OwnColumn("code", 64),
        Found("of the same content"),
        Shown("The save id of the checkpoint from which training resumed."),
    ] = None
    # the account of registered_by
    owner: Annotated[str | None, OwnColumn("code", 192), Found("the first"), Hidden()] = None
    # fingerprint of the commit objects: the scanner skips unchanged ones
    fingerprint: Annotated[
        str | None,
        OwnColumn("code", 64),
        Found("of the same content"),
        Shown("Fingerprint of the commit; it changes with the content."),
    ] = None
    content_digest: Annotated[
        str | None,
        OwnColumn("code", 32),
        Found("of the same content"),
        Shown("Digest of the names and digests of all tensors; null without a manifest or a verification."),
    ] = None
    user_metadata: Annotated[
        Any, OwnColumn("json"), Found("always"), Shown("Metadata that the trainer passed to the save.")
    ] = None
    # run, framework and library versions, timings from the manifest
    provenance: Annotated[
        Any, OwnColumn("json"), Found("always"), Shown("Records of the writer: versions, ranks, and timings.")
    ] = None
    structure_digest: Annotated[
        str | None, JoinedColumn("structures", "digest"), Shown("Digest of names, shapes and dtypes.")
    ] = None
    tensor_count: Annotated[int | None, JoinedColumn("structures", "tensor_count")] = None
    object_count: Annotated[
        int | None, JoinedColumn("structures", "object_count"), Shown("Number of values other than tensors.")
    ] = None
    element_count: Annotated[
        int | None, JoinedColumn("structures", "element_count"), Shown("Elements of all tensors.")
    ] = None


@dataclass(frozen=True, slots=True)
class Registered:
    """The result of a registration.

    ``id`` is None for an unknown checkpoint reported as deleted. ``is_present`` is True if storage has the
    checkpoint.
    """

    id: Annotated[int | None, Shown("null: an unknown checkpoint was reported as deleted.")]
    root: str
    key: str
    is_new: Annotated[bool, Shown("True if the catalog did not have the checkpoint.")]
    is_present: Annotated[bool, Shown("True if storage has the checkpoint.")]
    save_id: Annotated[str | None, Shown("Unique id that the writer gave the save.")] = None
    warnings: Annotated[
        tuple[str, ...],
        Shown("Warnings about byte limits of the account or root.", may_be_absent=True),
    ] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """A folder of checkpoints. Counts, sums and latest values cover committed checkpoints."""

    id: Annotated[int, OwnColumn("id")]
    root: Annotated[str, JoinedColumn("roots", "name")]
    key: Annotated[str, OwnColumn("name"), Shown("Relative to the root; empty: the root.")]
    checkpoint_count: Annotated[
        int, OwnColumn("integer", default=0), Shown("Number of committed checkpoints.")
    ]
    latest_step: Annotated[int | None, OwnColumn("large"), Shown("Highest step of a committed checkpoint.")]
    latest_at: Annotated[
        datetime | None, OwnColumn("seconds"), Shown("Commit time of the newest checkpoint.")
    ]
    bytes: Annotated[int, OwnColumn("large", default=0), Shown("Bytes of committed checkpoints.")]
    created_at: Annotated[datetime, OwnColumn("seconds")]
    updated_at: Annotated[datetime, OwnColumn("seconds")]


@dataclass(frozen=True, slots=True)
class Root:
    """A configured place of checkpoints. Only admins see ``url``.

    ``lost`` counts checkpoints that the last scan missed but kept, because too many were missing at once;
    ``last_scan`` is the report of the scan.
    """

    name: str
    description: Annotated[str, Shown("Text of the settings.")] = ""
    url: Annotated[str | None, Shown("The place of the root; only for keys with the scope admin.")] = None
    is_configured: Annotated[bool, Shown("False: removed from the settings; its rows stay.")] = True
    readonly: Annotated[bool, Shown("True: checkpoints cannot be deleted or converted into this root.")] = (
        False
    )
    scan_every_seconds: Annotated[float | None, Shown("None: only on request.")] = None
    scanned_at: Annotated[datetime | None, Shown("End of the last scan.")] = None
    scan_error: Annotated[str | None, Shown("Failure of the last scan; null: none.")] = None
    lost: Annotated[
        int,
        Shown(
            "Checkpoints that the last scan missed but kept, because too many were missing at once. "
            "Confirm a real loss with a scan job and accept_lost.",
            may_be_absent=True,
        ),
    ] = 0
    last_scan: Annotated[
        Any,
        Shown(
            "The report of the last complete scan: found, opened, new, vanished, trouble, ...",
            may_be_absent=True,
        ),
    ] = None

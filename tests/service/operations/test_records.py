"""Declared records. Internal: compared with the migrations, the schemas and what the client asks for."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from sqlalchemy import BigInteger, Boolean, Float, Integer, String, Text, inspect

from dcp.server.catalog.queries.filters import CheckpointFilter, MetricCondition
from dcp.server.client import calls
from dcp.server.client.decoding import decode
from dcp.server.database.engine import Database
from dcp.server.records.checkpoints import Checkpoint, CheckpointDetail
from dcp.server.records.declaring import fields_of, moment
from dcp.server.records.runs import Run
from dcp.server.schemas.checkpoints import CheckpointAnswer, CheckpointDetailAnswer
from dcp.server.schemas.queries import CheckpointQuery
from dcp.server.schemas.records import RecordAnswer
from dcp.server.schemas.runs import RunAnswer

pytestmark = pytest.mark.each_database  # their SQL differs

TABLES = [
    ("checkpoints", CheckpointDetail, {"root_id", "step_order", "observed_seconds", "announced"}),
    ("runs", Run, {"root_id", "latest_order"}),
]
TYPES = {
    "id": Integer,
    "reference": Integer,
    "name": Text,
    "code": String,
    "text": Text,
    "integer": Integer,
    "large": BigInteger,
    "seconds": Float,
    "flag": Boolean,
}

CHECKPOINT = {
    "id": 7,
    "root": "main",
    "run_id": 3,
    "run": "llama",
    "key": "llama/step-10",
    "name": "step-10",
    "step": 10,
    "format": "dcp",
    "state": "deleted",
    "committed_at": moment(90.25),
    "discovered_at": moment(91.0),
    "updated_at": moment(92.0),
    "deleted_at": moment(93.0),
    "purge_after": None,
    "bytes": 1 << 40,
    "file_count": 2,
    "world_size": None,
    "structure_id": 5,
    "dtypes": {"bfloat16": 1 << 40},
    "verification": "damaged",
    "verified_at": moment(253_402_300_799.0),
    "problem": "a block",
    "is_pinned": True,
    "tags": ("a", "b"),
    "aliases": ("best",),
    "metrics": {"loss": 2.5},
    "version": 4,
    "etag": '"c7-4"',
}
DETAIL = CHECKPOINT | {
    "save_id": "s",
    "resumed_from": "r",
    "content_digest": None,
    "fingerprint": None,
    "user_metadata": {"x": [1]},
    "provenance": None,
}
RUN = {
    "id": 3,
    "root": "main",
    "key": "",
    "checkpoint_count": 2,
    "latest_step": None,
    "latest_at": None,
    "bytes": 9,
    "created_at": moment(1.0),
    "updated_at": moment(2.5),
}


@pytest.mark.parametrize(("table", "record", "hidden"), TABLES, ids=["checkpoints", "runs"])
def test_declared_columns_are_those_of_the_migrations(
    database: Database, table: str, record: type[Any], hidden: set[str]
) -> None:
    """By name, type and whether there may be none; besides there are only those that are never shown."""
    with database.read() as connection:
        migrated = {column["name"]: column for column in inspect(connection).get_columns(table)}
    declared = {field.column: field for field in fields_of(record) if field.stored is not None}
    assert migrated.keys() == declared.keys() | hidden
    for name, field in declared.items():
        assert field.stored is not None
        assert migrated[name]["nullable"] == field.is_optional, name
        if field.stored.type in TYPES:
            assert isinstance(migrated[name]["type"], TYPES[field.stored.type]), name
        if field.stored.type == "code":
            assert migrated[name]["type"].length == field.stored.size  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("record", "answer", "values"),
    [
        (Checkpoint, CheckpointAnswer, CHECKPOINT),
        (CheckpointDetail, CheckpointDetailAnswer, DETAIL),
        (Run, RunAnswer, RUN),
    ],
    ids=["checkpoint", "detail", "run"],
)
def test_the_client_reads_the_record_that_the_service_has(
    record: type[Any], answer: type[RecordAnswer], values: dict[str, Any]
) -> None:
    """From the value to JSON, which its schema allows, and back: the same, of the same class."""
    found = record(**values)
    text = answer.of(found).model_dump_json()
    assert answer.model_validate_json(text).model_dump_json() == text
    assert decode(record, json.loads(text)) == found


def test_an_answer_is_of_its_own_record() -> None:
    """A checkpoint of a list has not all that a detail answers with."""
    with pytest.raises(TypeError, match="of a CheckpointDetail, not of a Checkpoint"):
        CheckpointDetailAnswer.of(Checkpoint(**CHECKPOINT))  # type: ignore[arg-type]


def test_what_may_be_asked_for_is_the_same_everywhere() -> None:
    """In the client's query and in the service's; the catalog's filter has what records and query name."""
    asked = set(CheckpointQuery.model_fields) - {"limit", "cursor"}
    assert set(calls.CheckpointQuery.__annotations__) == asked
    given = CheckpointQuery(min_step=3, pinned=True, state=["any"], tag=["a"], metric=["loss<1"]).wanted
    assert given == CheckpointFilter(
        min_step=3,
        is_pinned=True,
        states=frozenset(),
        tags=frozenset({"a"}),
        metrics=(MetricCondition("loss", "<", 1.0),),
    )
    for field in fields_of(CheckpointDetail):
        names = [field.any_of.name] if field.any_of is not None else []
        if field.within is not None:
            names += [field.within.least, field.within.most or field.within.below]
        assert set(names) <= {one.name for one in dataclasses.fields(CheckpointFilter)}

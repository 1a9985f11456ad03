"""The client's models say what the service's answers say, without importing them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel

from dcp.server.client.decoding import decode
from dcp.server.client.errors import AnswerError
from dcp.server.records.administration import (
    CreatedKey,
    Delivery,
    Key,
    RetentionDecision,
    RetentionPolicy,
    RetentionPreview,
    RetentionTotals,
    Rule,
    TensorBytes,
    Webhook,
    WebhookSecret,
    Whoami,
)
from dcp.server.records.checkpoints import Checkpoint, CheckpointDetail, Registered
from dcp.server.records.contents import (
    Chunk,
    Diff,
    File,
    ObjectDifference,
    RankShare,
    ShardedTensor,
    Statistics,
    Tensor,
    TensorDifference,
    TensorFacts,
    TreeNode,
    Verification,
)
from dcp.server.records.drawings import (
    DriftLayer,
    DriftStep,
    PhaseRow,
    RunDrift,
    SavePhase,
    SavePhases,
    ShardMap,
    ShardMapRow,
    TensorGrid,
    TensorStatistics,
)
from dcp.server.records.jobs import (
    Job,
    JobFailure,
    JobLogLine,
    JobProgress,
    JobTask,
    JobThroughput,
    JobWaiting,
)
from dcp.server.records.labels import Alias, Lineage, LineageEdge, LineageNode
from dcp.server.records.roots import Root
from dcp.server.records.runs import BinValues, Run, RunTimeline, TimelineBin
from dcp.server.records.search import CheckpointFacets, Facet, FacetValue, SearchHit, SearchResult
from dcp.server.schemas import checkpoints, jobs, labels, lineage, roots, runs, search
from dcp.server.schemas.administration import keys, retention, rules, webhooks
from dcp.server.schemas.contents import data, drawings, findings

PAIRS = [
    (Root, roots.RootAnswer),
    (Run, runs.RunAnswer),
    (RunTimeline, runs.TimelineAnswer),
    (TimelineBin, runs.TimelineBinAnswer),
    (BinValues, runs.BinValuesAnswer),
    (RunDrift, drawings.DriftAnswer),
    (DriftStep, drawings.DriftStepAnswer),
    (DriftLayer, drawings.DriftLayerAnswer),
    (Whoami, keys.WhoamiAnswer),
    (SavePhases, drawings.PhasesAnswer),
    (SavePhase, drawings.SavePhaseAnswer),
    (PhaseRow, drawings.PhaseRowAnswer),
    (ShardMap, drawings.ShardMapAnswer),
    (ShardMapRow, drawings.ShardMapRowAnswer),
    (TensorGrid, drawings.GridAnswer),
    (TensorStatistics, drawings.TensorStatisticsAnswer),
    (CheckpointFacets, search.FacetsAnswer),
    (Facet, search.FacetAnswer),
    (FacetValue, search.FacetValueAnswer),
    (SearchResult, search.SearchAnswer),
    (SearchHit, search.SearchHitAnswer),
    (Checkpoint, checkpoints.CheckpointAnswer),
    (CheckpointDetail, checkpoints.CheckpointDetailAnswer),
    (Registered, checkpoints.RegisteredAnswer),
    (Alias, labels.AliasAnswer),
    (Lineage, lineage.LineageAnswer),
    (LineageNode, lineage.LineageNode),
    (LineageEdge, lineage.LineageEdge),
    (File, data.FileAnswer),
    (Tensor, data.TensorAnswer),
    (TreeNode, data.TreeNodeAnswer),
    (Chunk, data.ChunkAnswer),
    (ShardedTensor, data.ShardedTensorAnswer),
    (RankShare, data.RankShareAnswer),
    (Diff, data.DiffAnswer),
    (TensorDifference, data.TensorDifferenceAnswer),
    (TensorFacts, data.TensorFactsAnswer),
    (ObjectDifference, data.ObjectDifferenceAnswer),
    (Verification, findings.VerificationAnswer),
    (Statistics, findings.StatisticsAnswer),
    (Job, jobs.JobAnswer),
    (JobFailure, jobs.JobErrorAnswer),
    (JobWaiting, jobs.WaitingAnswer),
    (JobTask, jobs.TaskAnswer),
    (JobProgress, jobs.ProgressAnswer),
    (JobThroughput, jobs.ThroughputAnswer),
    (JobLogLine, jobs.LogLineAnswer),
    (RetentionTotals, retention.TotalsAnswer),
    (TensorBytes, retention.TensorBytesAnswer),
    (Key, keys.KeyAnswer),
    (CreatedKey, keys.NewKeyAnswer),
    (Webhook, webhooks.WebhookAnswer),
    (WebhookSecret, webhooks.SecretAnswer),
    (Delivery, webhooks.DeliveryAnswer),
    (Rule, rules.RuleAnswer),
    (RetentionPolicy, retention.PolicyAnswer),
    (RetentionDecision, retention.DecisionAnswer),
    (RetentionPreview, retention.RunPreview),
]


@pytest.mark.parametrize(("model", "answer"), PAIRS, ids=lambda each: each.__name__)
def test_as_the_service_answers(model: type[Any], answer: type[BaseModel]) -> None:
    """Every member of an answer is in the model, and none that no answer has."""
    given = {field.name for field in dataclasses.fields(model)}
    assert given == set(answer.model_fields) - {"next_cursor"}


def test_a_later_service_may_say_more() -> None:
    """Members that this client does not know are passed over, also inside of others."""
    document = {
        "fqn": "w",
        "kind": "changed",
        "before": {"dtype": "float32", "shape": [2], "new": 1},
        "after": None,
        "new": 2,
    }
    found = decode(TensorDifference, document)
    assert found == TensorDifference("w", "changed", TensorFacts("float32", (2,)), None)


@pytest.mark.parametrize(
    "document", [None, [], {}, {"fqn": 7}, {"fqn": "w", "kind": "k", "dtype": None, "shape": "3", "bytes": 1}]
)
def test_answers_that_are_none(document: Any) -> None:
    """Are errors of the client's tree, which say what is wrong."""
    with pytest.raises(AnswerError, match="Tensor"):
        decode(Tensor, document)


def test_the_client_imports_nothing_of_the_service() -> None:
    """Neither the service's parts nor their dependencies, nor torch, nor numpy: httpx is enough."""
    code = (
        "import sys, dcp.server.client;"
        "bad = {'torch', 'numpy', 'fastapi', 'pydantic', 'sqlalchemy', 'dcp.server.settings'};"
        "ours = {m for m in sys.modules if m.startswith('dcp.server.') and '.client' not in m"
        " and not m.startswith('dcp.server.records')};"
        "found = (bad & set(sys.modules)) | ours; print(found); sys.exit(bool(found))"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, check=False, capture_output=True)
    assert ended.returncode == 0, ended.stdout

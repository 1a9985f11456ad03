"""The client's models say what the service's answers say, without importing them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel

from dcp.server.client import models, models_admin
from dcp.server.client.decoding import decode
from dcp.server.client.errors import AnswerError
from dcp.server.schemas import checkpoints, data, findings, jobs, labels, lineage, roots, runs
from dcp.server.schemas.administration import keys, retention, rules, webhooks

PAIRS = [
    (models.Root, roots.RootAnswer),
    (models.Run, runs.RunAnswer),
    (models.Checkpoint, checkpoints.CheckpointAnswer),
    (models.CheckpointDetail, checkpoints.CheckpointDetailAnswer),
    (models.Registered, checkpoints.RegisteredAnswer),
    (models.Alias, labels.AliasAnswer),
    (models.Lineage, lineage.LineageAnswer),
    (models.LineageNode, lineage.LineageNode),
    (models.LineageEdge, lineage.LineageEdge),
    (models.File, data.FileAnswer),
    (models.Tensor, data.TensorAnswer),
    (models.TreeNode, data.TreeNodeAnswer),
    (models.Chunk, data.ChunkAnswer),
    (models.ShardedTensor, data.ShardedTensorAnswer),
    (models.RankShare, data.RankShareAnswer),
    (models.Diff, data.DiffAnswer),
    (models.TensorDifference, data.TensorDifferenceAnswer),
    (models.TensorFacts, data.TensorFactsAnswer),
    (models.ObjectDifference, data.ObjectDifferenceAnswer),
    (models.Verification, findings.VerificationAnswer),
    (models.Statistics, findings.StatisticsAnswer),
    (models.Job, jobs.JobAnswer),
    (models.JobFailure, jobs.JobErrorAnswer),
    (models.JobWaiting, jobs.WaitingAnswer),
    (models.JobTask, jobs.TaskAnswer),
    (models.Progress, jobs.ProgressAnswer),
    (models_admin.Key, keys.KeyAnswer),
    (models_admin.NewKey, keys.NewKeyAnswer),
    (models_admin.Webhook, webhooks.WebhookAnswer),
    (models_admin.WebhookSecret, webhooks.SecretAnswer),
    (models_admin.Delivery, webhooks.DeliveryAnswer),
    (models_admin.Rule, rules.RuleAnswer),
    (models_admin.RetentionPolicy, retention.PolicyAnswer),
    (models_admin.RetentionDecision, retention.DecisionAnswer),
    (models_admin.RetentionPreview, retention.RunPreview),
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
    found = decode(models.TensorDifference, document)
    assert found == models.TensorDifference("w", "changed", models.TensorFacts("float32", (2,)), None)


@pytest.mark.parametrize(
    "document", [None, [], {}, {"fqn": 7}, {"fqn": "w", "kind": "k", "dtype": None, "shape": "3", "bytes": 1}]
)
def test_answers_that_are_none(document: Any) -> None:
    """Are errors of the client's tree, which say what is wrong."""
    with pytest.raises(AnswerError, match="Tensor"):
        decode(models.Tensor, document)


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

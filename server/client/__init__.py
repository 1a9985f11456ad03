"""The typed client of the service: `Client`, `AsyncClient`, types of answers, and one tree of errors.

`Client` is safe to use from several threads; `AsyncClient` is for asyncio and trio, one loop each.

It needs httpx (``pip install 'dcphub[catalog]'``) and nothing of the service itself.
"""

from dcp.server.client.asynchronous.client import AsyncClient
from dcp.server.client.asynchronous.connection import AsyncPages
from dcp.server.client.calls import CheckpointQuery, DiffQuery, DownloadQuery
from dcp.server.client.errors import (
    AnswerError,
    BadRequestError,
    ClientError,
    ConflictError,
    DownloadError,
    ForbiddenError,
    GoneError,
    JobCancelledError,
    JobError,
    JobFailedError,
    NotFoundError,
    PreconditionFailedError,
    PreconditionRequiredError,
    ProblemError,
    RangeError,
    TooManyRequestsError,
    TransportError,
    UnauthorizedError,
    UnavailableError,
    UnprocessableError,
    WaitTimeoutError,
)
from dcp.server.client.events import JobEvent
from dcp.server.client.generated.models import Rule, Verification
from dcp.server.client.synchronous.client import Client
from dcp.server.client.synchronous.connection import Pages
from dcp.server.records.administration import (
    CreatedKey,
    Delivery,
    Key,
    RetentionDecision,
    RetentionPolicy,
    RetentionPreview,
    Webhook,
    WebhookSecret,
)
from dcp.server.records.checkpoints import Checkpoint, CheckpointDetail, Registered
from dcp.server.records.contents import (
    Diff,
    File,
    LoadCheck,
    RankShare,
    ShardedTensor,
    Statistics,
    Tensor,
    TreeNode,
)
from dcp.server.records.jobs import Job, JobProgress, JobTask
from dcp.server.records.labels import Alias, Lineage, Series
from dcp.server.records.roots import Root
from dcp.server.records.runs import Run

__all__ = [
    "Alias",
    "AnswerError",
    "AsyncClient",
    "AsyncPages",
    "BadRequestError",
    "Checkpoint",
    "CheckpointDetail",
    "CheckpointQuery",
    "Client",
    "ClientError",
    "ConflictError",
    "CreatedKey",
    "Delivery",
    "Diff",
    "DiffQuery",
    "DownloadError",
    "DownloadQuery",
    "File",
    "ForbiddenError",
    "GoneError",
    "Job",
    "JobCancelledError",
    "JobError",
    "JobEvent",
    "JobFailedError",
    "JobProgress",
    "JobTask",
    "Key",
    "Lineage",
    "LoadCheck",
    "NotFoundError",
    "Pages",
    "PreconditionFailedError",
    "PreconditionRequiredError",
    "ProblemError",
    "RangeError",
    "RankShare",
    "Registered",
    "RetentionDecision",
    "RetentionPolicy",
    "RetentionPreview",
    "Root",
    "Rule",
    "Run",
    "Series",
    "ShardedTensor",
    "Statistics",
    "Tensor",
    "TooManyRequestsError",
    "TransportError",
    "TreeNode",
    "UnauthorizedError",
    "UnavailableError",
    "UnprocessableError",
    "Verification",
    "WaitTimeoutError",
    "Webhook",
    "WebhookSecret",
]

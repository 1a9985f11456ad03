"""The durable ledger of jobs: each is completed once, whoever dies meanwhile.

What may become of a job is in `transitions`, `claims` and `failures`, all of which take a `Connection` first;
what is done in its phases is in `dcp.server.jobs.kinds`.
"""

from dcp.server.jobs.ledger.claims import NO_LIMITS, ClaimLimits, claim, has_work, renew, stopped
from dcp.server.jobs.ledger.failures import DEFAULT_BACKOFF, expire_leases, fail, has_expired
from dcp.server.jobs.ledger.reading import (
    JobFilter,
    find_job,
    get_job,
    job_events_after,
    list_jobs,
    list_tasks,
    payload_of,
    plan_of,
    task_documents,
    task_results,
)
from dcp.server.jobs.ledger.rows import is_large, progress_of
from dcp.server.jobs.ledger.states import (
    Backoff,
    Claim,
    FailureFacts,
    Held,
    JobEventRow,
    JobRow,
    JobSpec,
    StaleFenceError,
    TaskRow,
    TaskSpec,
)
from dcp.server.jobs.ledger.transitions import (
    add_tasks,
    complete_discard,
    complete_plan,
    complete_publish,
    complete_task,
    release,
    request_cancel,
    retry,
    submit,
    submit_or_join,
)

__all__ = [
    "DEFAULT_BACKOFF",
    "NO_LIMITS",
    "Backoff",
    "Claim",
    "ClaimLimits",
    "FailureFacts",
    "Held",
    "JobEventRow",
    "JobFilter",
    "JobRow",
    "JobSpec",
    "StaleFenceError",
    "TaskRow",
    "TaskSpec",
    "add_tasks",
    "claim",
    "complete_discard",
    "complete_plan",
    "complete_publish",
    "complete_task",
    "expire_leases",
    "fail",
    "find_job",
    "get_job",
    "has_expired",
    "has_work",
    "is_large",
    "job_events_after",
    "list_jobs",
    "list_tasks",
    "payload_of",
    "plan_of",
    "progress_of",
    "release",
    "renew",
    "request_cancel",
    "retry",
    "stopped",
    "submit",
    "submit_or_join",
    "task_documents",
    "task_results",
]

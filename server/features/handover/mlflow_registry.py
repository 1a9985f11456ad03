"""MLflow: model versions with the checkpoint's URL as source, by the REST API of the registry.

The tag ``dcphub.identity`` finds a version again, so repeated handovers create no duplicates. MLflow has no
conditional requests, and a stalled worker can resume between search and creation. Each worker therefore
searches again afterwards: the oldest version stays, and younger versions without an alias are deleted.
Requests go to addresses checked by the guard of webhooks; redirects are not followed.
"""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, urlsplit

import httpx

from dcp.server.core.jobs.kind import PermanentJobError, UnavailableJobError
from dcp.server.features.handover.destinations import (
    CheckpointFacts,
    HandedOver,
    HandoverSettings,
    MlflowSettings,
    checked_url,
    model_name,
    refusal,
)
from dcp.server.features.webhooks.addresses import (
    Allowed,
    RefusedUrlError,
    WebhookUrl,
    permitted_addresses,
    resolve_host,
)
from dcp.version import __version__

IDENTITY: Final = "dcphub.identity"
DELETED: Final = "dcphub.deleted"
REPLACED: Final = "dcphub.replaced"
_MAX_ANSWER_BYTES: Final = 4 << 20
_MAX_METRICS: Final = 100
_SAFE: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


class MlflowRegistry:
    """Model registry of a tracking server, a context manager.

    Raises PermanentJobError for refused requests, UnavailableJobError if the server is unreachable.
    """

    def __init__(self, options: HandoverSettings, mlflow: MlflowSettings) -> None:
        self._options = options
        self._mlflow = mlflow
        target = checked_url(options, "mlflow", mlflow.url)
        self._base, self._extensions, host = self._address(target)
        headers = {"Host": host, "User-Agent": f"dcphub/{__version__}"}
        auth: httpx.Auth | None = None
        if mlflow.token is not None:
            headers["Authorization"] = f"Bearer {mlflow.token.get_secret_value()}"
        elif mlflow.user is not None and mlflow.password is not None:
            auth = httpx.BasicAuth(mlflow.user, mlflow.password.get_secret_value())
        self._http = httpx.Client(
            headers=headers,
            auth=auth,
            timeout=mlflow.seconds,
            trust_env=False,
            verify=ssl.create_default_context() if target.scheme == "https" else False,
        )

    def _address(self, target: WebhookUrl) -> tuple[str, dict[str, Any], str]:
        """Resolve the host once, check its addresses, and return a base URL with the first address."""
        try:
            address, *_ = permitted_addresses(
                target, Allowed.parse(self._options.allow_private), resolve_host
            )
        except RefusedUrlError as error:
            raise PermanentJobError(f"mlflow: {refusal(error)}") from error
        except (OSError, UnicodeError) as error:
            raise UnavailableJobError(f"mlflow: the host name {target.host} cannot be resolved") from error
        shown = f"[{address}]" if ":" in address else address
        base = f"{target.scheme}://{shown}:{target.port}{target.path.partition('?')[0].rstrip('/')}"
        return base, {"sni_hostname": target.host}, target.host_header

    def __enter__(self) -> MlflowRegistry:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    # -- handovers -------------------------------------------------------------------------------------------

    def hand_over(self, facts: CheckpointFacts, reference: str) -> HandedOver:
        """Register the checkpoint as a version of its run's model, or update the version."""
        name = model_name(self._mlflow.name, facts)
        tags = self._tags(facts)
        versions = self._find(name, facts.identity)
        if not versions:
            self._make_model(name)
            made = self._make_version(name, facts, reference, tags)
            versions = self._find(name, facts.identity) or {made: False}
        else:
            for key, value in {**tags, DELETED: "false", REPLACED: "false"}.items():
                self._tag(name, min(versions), key, value)
        version = min(versions)
        for younger, is_used in versions.items():
            if younger != version and not is_used:
                body = {"name": name, "version": str(younger)}
                self._call("DELETE", "model-versions/delete", body, ignored="RESOURCE_DOES_NOT_EXIST")
        return HandedOver(name, str(version), self._link(name, version))

    def mark_deleted(self, name: str, identity: str) -> HandedOver | None:
        """Tag the version of a deleted checkpoint; None without a version."""
        return self._mark(name, identity, DELETED)

    def mark_replaced(self, name: str, identity: str) -> None:
        """Tag the version of a replaced save: its URL now leads to the new content."""
        self._mark(name, identity, REPLACED)

    def _mark(self, name: str, identity: str, tag: str) -> HandedOver | None:
        versions = self._find(name, identity)
        for version in versions:
            self._tag(name, version, tag, "true")
        if not versions:
            return None
        first = min(versions)
        return HandedOver(name, str(first), self._link(name, first), is_marked_deleted=True)

    def _find(self, name: str, identity: str) -> dict[int, bool]:
        """Return the versions of this content; True marks versions with an alias or stage."""
        wanted = f"name = '{name}' AND tags.`{IDENTITY}` = '{identity}'"
        found = self._call("GET", "model-versions/search", {"filter": wanted, "max_results": "100"})
        versions = found.get("model_versions") or []
        if not isinstance(versions, list):
            raise PermanentJobError("mlflow: the response has no list of model versions")
        return {
            _number(one): bool(one.get("aliases")) or one.get("current_stage") not in (None, "", "None")
            for one in versions
        }

    def _make_model(self, name: str) -> None:
        body = {"name": name, "description": "Checkpoints registered by reference from dcphub."}
        self._call("POST", "registered-models/create", body, ignored="RESOURCE_ALREADY_EXISTS")

    def _make_version(
        self, name: str, facts: CheckpointFacts, reference: str, tags: Mapping[str, str]
    ) -> int:
        pages = facts.pages(self._options)
        body: dict[str, Any] = {
            "name": name,
            "source": reference,
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
            "description": f"Checkpoint {facts.key} of root {facts.root}.",
        }
        if pages:
            body["run_link"] = pages["run"]
            body["description"] += f" [Its page in dcphub]({pages['checkpoint']})"
        made = self._call("POST", "model-versions/create", body, hidden=reference)
        return _number(made.get("model_version"))

    def _tag(self, name: str, version: int, key: str, value: str) -> None:
        body = {"name": name, "version": str(version), "key": key, "value": value}
        self._call("POST", "model-versions/set-tag", body)

    def _tags(self, facts: CheckpointFacts) -> dict[str, str]:
        pages = facts.pages(self._options)
        found: dict[str, object] = {
            IDENTITY: facts.identity,
            "dcphub.checkpoint": f"{facts.root}:{facts.key}",
            "dcphub.step": facts.step,
            "dcphub.format": facts.format,
            "dcphub.bytes": facts.bytes,
            "dcphub.committed_at": facts.committed_at,
            "dcphub.save_id": facts.save_id,
            "dcphub.fingerprint": facts.fingerprint,
            "dcphub.content_digest": facts.content_digest,
            "dcphub.aliases": ", ".join(facts.aliases) or None,
            "dcphub.url": pages.get("checkpoint"),
        }
        for name, value in sorted(facts.metrics.items())[:_MAX_METRICS]:
            clean = "".join(one if one in _SAFE else "_" for one in name)
            found[f"dcphub.metrics.{clean}"[:250]] = repr(value)
        return {key: str(value) for key, value in found.items() if value is not None}

    def _link(self, name: str, version: int) -> str:
        return f"{self._mlflow.url.rstrip('/')}/#/models/{quote(name, safe='')}/versions/{version}"

    # -- requests --------------------------------------------------------------------------------------------

    def _call(
        self, method: str, path: str, given: Mapping[str, Any], *, ignored: str = "", hidden: str = ""
    ) -> dict[str, Any]:
        """Call an endpoint and return its JSON; an empty object for the error code ``ignored``. Messages
        never contain the text ``hidden``."""
        url = f"{self._base}/api/2.0/mlflow/{path}"
        sent: dict[str, Any] = {"params": given} if method == "GET" else {"json": given}
        try:
            status, body = self._answer(method, url, sent)
        except (httpx.TransportError, httpx.DecodingError) as error:
            host = urlsplit(self._mlflow.url).hostname
            why = "did not respond in time" if isinstance(error, httpx.TimeoutException) else "is unreachable"
            raise UnavailableJobError(f"mlflow: {host} {why}: {self._clean(error)}") from error
        document = _object(body)
        code = self._clean(document.get("error_code", ""))[:64]
        if 200 <= status < 300:
            return document
        if code and code == ignored:
            return {}
        message = self._clean(document.get("message", "")).replace(hidden or "\0", "the checkpoint's URL")
        where = f"mlflow answered {status} to {path}: {code or 'no error code'}"
        if status == 429 or status >= 500:
            raise UnavailableJobError(f"{where}: {message}")
        if status in (401, 403):
            raise PermanentJobError(f"{where}: check the credentials in features.handover.mlflow")
        if "local path" in message:
            message += (
                " Set features.handover.urls to the root's URL as seen by training, for example s3://..."
            )
        raise PermanentJobError(f"{where}: {message}")

    def _answer(self, method: str, url: str, sent: Mapping[str, Any]) -> tuple[int, bytes]:
        give_up = time.monotonic() + self._mlflow.seconds
        body = b""
        request = self._http.build_request(method, url, **sent, extensions=self._extensions)
        answer = self._http.send(request, stream=True)
        try:
            for part in answer.iter_bytes():
                body += part
                if len(body) > _MAX_ANSWER_BYTES:
                    raise PermanentJobError(f"mlflow: a response has more than {_MAX_ANSWER_BYTES} bytes")
                if time.monotonic() > give_up:
                    raise httpx.ReadTimeout(f"no response within {self._mlflow.seconds:g} s")
        finally:
            answer.close()
        return answer.status_code, body

    def _clean(self, text: object) -> str:
        return self._options.clean(str(text))


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(version: object) -> int:
    """Return the version number of an answer. Raises PermanentJobError without a number."""
    number = str(version.get("version", "")) if isinstance(version, dict) else ""
    if not re.fullmatch("[0-9]{1,18}", number):
        raise PermanentJobError("mlflow: the response has no model version")
    return int(number)

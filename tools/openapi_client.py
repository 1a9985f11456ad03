"""Python from an OpenAPI document: data classes of the answers, and a method for each operation."""

from __future__ import annotations

import textwrap
from collections.abc import Container, Mapping
from typing import Any, Final

__all__ = ["modules"]

_API: Final = "/api/v1"
_SCALARS: Final = {"boolean": "bool", "integer": "int", "null": "None", "number": "float", "string": "str"}
_NAMES: Final = {
    "ApiKey": "Key",
    "DecisionAnswer": "RetentionDecision",
    "FacetsAnswer": "CheckpointFacets",
    "GridAnswer": "TensorGrid",
    "JobErrorAnswer": "JobFailure",
    "LogLineAnswer": "JobLogLine",
    "PhasesAnswer": "SavePhases",
    "PointAnswer": "SeriesPoint",
    "PolicyAnswer": "RetentionPolicy",
    "ProgressAnswer": "JobProgress",
    "RunPreview": "RetentionPreview",
    "SecretAnswer": "WebhookSecret",
    "TaskAnswer": "JobTask",
    "ThroughputAnswer": "JobThroughput",
    "TimelineAnswer": "RunTimeline",
    "TotalsAnswer": "RetentionTotals",
    "WaitingAnswer": "JobWaiting",
}
"""Names of models that differ from the schema's name without "Answer"."""
_BASES: Final = {"CheckpointDetail": "Checkpoint", "CreatedKey": "Key", "WebhookSecret": "Webhook"}
_OPTIONS: Final = {
    "change_retention_policy": "PolicyChanges",
    "change_rule": "RuleChanges",
    "change_webhook": "WebhookChanges",
    "check_load_of": "LoadOptions",
    "create_retention_policy": "PolicyOptions",
    "create_rule": "RuleOptions",
    "create_webhook": "WebhookOptions",
    "diff_checkpoints": "DiffQuery",
    "download_checkpoint": "DownloadQuery",
    "get_checkpoint_facets": "FacetQuery",
    "get_phases": "PhasesQuery",
    "get_run_timeline": "TimelineQuery",
    "get_shard_map": "ShardMapQuery",
    "list_checkpoints": "CheckpointQuery",
    "list_jobs": "JobQuery",
    "compare_runs": "ComparisonQuery",
    "list_run_summaries": "RunListQuery",
    "list_runs": "RunQuery",
    "list_stored_chunks": "StoredChunksQuery",
    "list_tensors": "TensorQuery",
    "lookup_checkpoint": "LookupQuery",
    "register_checkpoint": "RegistrationOptions",
}
"""Names of typed dictionaries with the optional parameters of an operation, or the optional members of its
body."""
_METHOD_NAMES: Final = {
    "cancel_job": "cancel",
    "change_metrics": "set_metrics",
    "check_load_of": "will_it_load",
    "check_load_of_state": "will_it_load",
    "compute_run_drift": "compute_drift",
    "delete_checkpoint": "delete",
    "diff_checkpoints": "diff",
    "download_checkpoint": "download",
    "list_webhook_deliveries": "deliveries",
    "lookup_checkpoint": "lookup",
    "pin_checkpoint": "pin",
    "preview_retention_policy_totals": "retention_policy_totals",
    "preview_retention_totals": "retention_totals",
    "redeliver_webhook_delivery": "redeliver",
    "register_checkpoint": "register",
    "restore_checkpoint": "restore",
    "retry_job": "retry",
    "submit_job": "submit",
    "tensor_data": "tensor",
    "unpin_checkpoint": "unpin",
    "verify_checkpoint": "verify",
    "watch_job": "watch",
}
"""Names of methods that differ from the operation's name without "get" and "list"."""
_IS_FINAL: Final = '''
    @property
    def is_final(self) -> bool:
        """True once the job has ended."""
        return self.state in ("succeeded", "failed", "cancelled")
'''
_MODELS: Final = '''"""Answers of the service, and options of its operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypedDict
'''
_METHODS: Final = '''"""Operations of the API as methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Unpack

from dcp.server.client.requests import (
    Call, Listing, Operation, PagedCall, given, many, nothing, one, query, segment, with_cursor
)
from dcp.server.client.generated import models


class Methods:
    """Methods of both clients that send one request each."""
'''

_WIDTH: Final = 106
"""Width of a line in a method, without the indentation of four."""

Json = Mapping[str, Any]


def modules(document: Json, written: Container[str]) -> dict[str, str]:
    """Return the text of "models", and of "methods" with a method for each operation except those ``written``
    by hand."""
    models = _Models(document["components"]["schemas"])
    operations = [
        _Operation(models, method.upper(), path.removeprefix(_API), operation)
        for path, by_method in sorted(document["paths"].items())
        for method, operation in sorted(by_method.items())
        if path.startswith(_API)
    ]
    methods = [(each.method_name, textwrap.indent(each.method(), "    ")) for each in operations]
    options = [each.typed_dict() for each in operations if each.options]
    return {
        "models": "\n\n".join([_MODELS, *models.classes(), *options]),
        "methods": "\n\n".join([_METHODS, *(text for name, text in methods if name not in written)]),
    }


class _Models:
    """Data classes of the schemas used by answers."""

    def __init__(self, schemas: Json) -> None:
        self.schemas = schemas
        self._components = {_class_name(component): component for component in schemas}
        self._used: set[str] = set()

    def classes(self) -> list[str]:
        """Return the used classes, base classes first."""
        texts: dict[str, str] = {}
        while new := self._used - texts.keys():
            texts |= {name: self._data_class(name) for name in new}
        return [texts[name] for name in sorted(texts, key=lambda name: (name in _BASES, name))]

    def use(self, schema: Json) -> str:
        """Return the class name of a reference, and record its use."""
        component = schema["$ref"].rpartition("/")[2]
        name = _class_name(component)
        if self._components[name] != component:
            raise ValueError(f"{component} and {self._components[name]} have the same name: {name}")
        self._used |= {name, _BASES.get(name, name)}
        return name

    def resolved(self, schema: Json) -> Json:
        """Return the schema of a reference."""
        return self.schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema

    def type_of(self, schema: Json, *, is_answer: bool) -> str:
        """Return the type of a value in an answer, or of an argument, which may be wider."""
        if "anyOf" in schema:
            kinds = {self.type_of(each, is_answer=is_answer) for each in schema["anyOf"]}
            return " | ".join(sorted(kinds, key=lambda kind: (kind == "None", kind)))
        if "$ref" in schema and is_answer:
            return self.use(schema)
        kind = "object" if {"$ref", "oneOf"} & schema.keys() else schema.get("type", "")
        if kind == "array":
            item = self.type_of(schema["items"], is_answer=is_answer)
            return f"tuple[{item}, ...]" if is_answer else f"{'str | ' * (item == 'str')}Sequence[{item}]"
        if kind == "object":
            values = schema.get("additionalProperties")
            item = self.type_of(values, is_answer=is_answer) if isinstance(values, dict) else "Any"
            return f"Mapping[str, {item}]"
        return "datetime" if schema.get("format") == "date-time" else _SCALARS.get(kind, "Any")

    def _data_class(self, name: str) -> str:
        schema, base = self.schemas[self._components[name]], _BASES.get(name)
        inherited = self.schemas[self._components[base]]["properties"] if base else ()
        members = [
            f"    {member}: {self.type_of(its, is_answer=True)}"
            f"{_default(its, member in schema.get('required', ()))}\n{_docstring(its.get('description', ''))}"
            for member, its in schema["properties"].items()
            if member not in inherited and member != "next_cursor"
        ]
        return (
            f"@dataclass(frozen=True, slots=True, kw_only=True)\nclass {name}{f'({base})' if base else ''}:\n"
            f"{_docstring(schema.get('description', 'An answer.'))}\n{''.join(members)}"
            f"{_IS_FINAL if name == 'Job' else ''}"
        )


class _Operation:
    """An operation. ``options`` is the name of the typed dictionary of its options."""

    def __init__(self, models: _Models, method: str, path: str, operation: Json) -> None:
        self.name = operation["operationId"]
        self.method_name = _METHOD_NAMES.get(self.name, self.name.removeprefix("get_").removeprefix("list_"))
        self.options = _OPTIONS.get(self.name)
        self._models = models
        self._method = method
        self._path = path
        self._operation = operation
        self._answer = _success(operation).get("application/json", {}).get("schema", {})
        self._members = models.resolved(self._answer).get("properties", {})
        self._is_paged = {"items", "next_cursor"} <= self._members.keys()
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        self._body = models.resolved(body.get("schema", {}))
        query = self._query()
        self._in_query = {each["name"]: each["schema"] for each in query}
        self._in_body = self._body.get("properties", {})
        self._given = self._in_query | self._in_body
        self._required = [each["name"] for each in query if each["required"]] + self._body.get("required", [])
        self._optional = [name for name in self._given if name not in self._required]
        self._in_options = [name for name in self._optional if self.options and name != "limit"]

    def typed_dict(self) -> str:
        """Return the typed dictionary of the options."""
        members = [
            f"    {name}: {self._type(name, may_be_none=self._method != 'PATCH')}\n"
            f"{_docstring(self._given[name].get('description', ''))}"
            for name in self._in_options
        ]
        about = _docstring(f"Options of {self._method} {self._path}.")
        return f"class {self.options}(TypedDict, total=False):\n{about}\n{''.join(members)}"

    def method(self) -> str:
        """Return the method that sends the request."""
        about = _docstring(self._operation.get("description", self.name).partition("\n\n")[0])
        _, result = self._result()
        if not self._is_paged:
            decorator, call, keywords = "Operation", "Call", []
        else:
            decorator, call = "Listing", "PagedCall"
            keywords = [f"page_size: int = {500 if '{' in self._path else 100}"]
        arguments = self._arguments(keywords)
        head = f"@{decorator}\ndef {self.method_name}({arguments}) -> {call}[{result}]:"
        line = f"    return {call}({self._request(self._url())})"
        if len(line) > _WIDTH:
            line = f"    path = {self._url()}\n    return {call}({self._request('path')})"
        return f"{head}\n{about}{line}"

    def _result(self) -> tuple[str, str]:
        """Return the function that parses the answer, and its result type."""
        if not self._answer:
            return "nothing", "None"
        is_list = "items" in self._members
        schema = self._members["items"]["items"] if is_list else self._answer
        model = f"{'models.' * ('$ref' in schema)}{self._models.type_of(schema, is_answer=True)}"
        if self._is_paged:
            return f"one({model})", model
        if is_list:
            return f"many({model})", f"list[{model}]"
        if "next_cursor" in self._members:
            return f"with_cursor({model})", f"tuple[{model}, str | None]"
        return f"one({model})", model

    def _arguments(self, keywords: list[str]) -> str:
        """Return required parameters as positional ones, and the others by name, after ``keywords``."""
        positional = [f"{each['name']}: {_SCALARS[each['schema']['type']]}" for each in self._places("path")]
        positional += [f"{name}: {self._type(name)}" for name in self._given if name in self._required]
        positional += ["body: Mapping[str, Any]"] * bool(self._body and not self._in_body)
        named = [name for name in self._optional if name not in self._in_options]
        keywords = keywords + [f"{name}: {self._type(name, may_be_none=True)} = None" for name in named]
        keywords += ["etag: str | None = None"] * self._has_etag()
        options = [f"**options: Unpack[models.{self.options}]"] if self.options else []
        return ", ".join(["self", *positional, *(["*", *keywords] if keywords else []), *options])

    def _request(self, path: str) -> str:
        """Return the arguments of the request."""
        parse, _ = self._result()
        responses, scope = self._operation["responses"], self._operation.get("x-required-scope")
        only_reads = self._method == "POST" and "200" in responses and scope == "read"
        has_secret = any(each.get("format") == "password" for each in self._members.values())
        query = [f"{name}={name}" for name in self._in_query if name not in self._in_options]
        query += ["**options"] * bool(self.options and not self._body)
        parts = {
            "page_size": self._is_paged,
            f'"{self._method}"': not self._is_paged,
            path: True,
            parse: True,
            f"query({', '.join(query)})": query,
            f"body={self._body_text()}": self._body,
            "etag=etag": self._has_etag(),
            "only_reads=True": only_reads and not self._is_paged,
            "has_secret=True": has_secret,
        }
        return ", ".join(text for text, applies in parts.items() if applies)

    def _body_text(self) -> str:
        """Return the body without members that are None, unless a change may set them to null."""
        members = [f'"{name}": {name}' for name in self._in_body if name not in self._in_options]
        text = f"{{{', '.join(members + ['**options'] * bool(self.options))}}}" if self._in_body else "body"
        return text if self._method == "PATCH" and self.options else f"given({text})"

    def _url(self) -> str:
        url = self._path
        for each in self._places("path"):
            if each["schema"]["type"] == "string":
                url = url.replace(f"{{{each['name']}}}", f"{{segment({each['name']})}}")
        return f'f"{url}"' if "{" in url else f'"{url}"'

    def _type(self, name: str, *, may_be_none: bool = False) -> str:
        kind = self._models.type_of(self._given[name], is_answer=False)
        return f"{kind} | None" if may_be_none and not kind.endswith("None") else kind

    def _query(self) -> list[Json]:
        left_out = {"cursor", "limit"} if self._is_paged else {"cursor"}
        found = [each for each in self._places("query") if each["name"] not in left_out]
        return [each for each in found if not each.get("deprecated") and not each["schema"].get("deprecated")]

    def _has_etag(self) -> bool:
        return any(each["name"] == "if-match" for each in self._places("header"))

    def _places(self, place: str) -> list[Json]:
        return [each for each in self._operation.get("parameters", ()) if each["in"] == place]


def _class_name(component: str) -> str:
    return _NAMES.get(component, component.removesuffix("Answer"))


def _success(operation: Json) -> Json:
    """Return the contents of the first successful answer by media type."""
    answers = (answer for status, answer in operation["responses"].items() if status.startswith("2"))
    content: Json = next(answers).get("content", {})
    return content


def _default(schema: Json, is_required: bool) -> str:
    if schema.get("format") == "password":
        return " = field(repr=False)"
    default = schema.get("default")
    is_nullable = "anyOf" in schema or not {"$ref", "type"} & schema.keys()
    return "" if is_required and not is_nullable else f" = {() if default == [] else default!r}"


def _docstring(text: str) -> str:
    if not text:
        return ""
    filled = textwrap.indent(textwrap.fill(" ".join(text.split()), 96), "    ").strip()
    return f'    """{filled}{" " if filled.endswith(chr(34)) else ""}"""\n'

"""The demo's last act: the checkpoints in a catalog. Torch-free, as the service itself is."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx

from dcp.demo.catalog_service import ROOT_NAME, CatalogService
from dcp.demo.checks import compare_digests
from dcp.demo.jobs import DemoError, Workplace
from dcp.demo.narration import Narrator
from dcp.demo.pages import PagesAct
from dcp.demo.places import FolderPlace, checkpoint_name
from dcp.server.client import Client, ClientError

__all__ = ["JOBS", "CatalogAct", "digests_of_safetensors"]

T = TypeVar("T")

JOBS: Final = ("uninterrupted", "run", "on-1-rank", "on-3-ranks", "damaged")
"""What has saved or been copied by now."""

_WAIT_SECONDS: Final = 240.0
_DTYPES: Final = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "I64": "int64", "U8": "uint8"}
"""What the demo's checkpoints hold, by the names of safetensors."""


class CatalogAct:
    """Serves, finds, verifies, converts by itself, and downloads; every claim is checked."""

    def __init__(self, work: Workplace, narrator: Narrator) -> None:
        self._work = work
        self._place = work.place
        self._narrator = narrator

    def tell(
        self, digests: dict[str, str], losses: Mapping[int, float], until_end: ExitStack
    ) -> CatalogService:
        """The service, which is up ``until_end``. ``digests`` are of what the last step of the job "run" has
        saved, ``losses`` by step those of the job "uninterrupted"."""
        self._narrator.chapter("Serve all of it as a catalog")
        told = "nothing configured" if isinstance(self._place, FolderPlace) else "only the bucket named"
        self._narrator.say(
            f"""dcp serve with {told}: the checkpoints there in an SQLite database, an API on this machine
            only, and a worker for its jobs."""
        )
        service = until_end.enter_context(CatalogService(self._work.root, self._place))
        self._narrator.say(f"It was ready after {service.ready_seconds:.1f} s, at {service.url}.")
        # with a transport of its own no proxy is asked for what is on this machine
        with Client(service.url, transport=httpx.HTTPTransport()) as client:
            try:
                self._find(client, losses)
                self._verify(client)
                export = self._convert(client, digests)
                self._look(client, service.url, export)
            except ClientError as error:
                raise DemoError(f"the catalog: {error}") from error
        return service

    def _find(self, client: Client, losses: Mapping[int, float]) -> None:
        client.wait(client.scan(ROOT_NAME), timeout_seconds=_WAIT_SECONDS)
        found = {one.key for one in client.checkpoints(root=ROOT_NAME)}
        every = self._work.save_every
        steps = range(every, self._work.steps + 1, every)
        there = {
            f"{job}/{checkpoint_name(step)}"
            for job in JOBS
            for step in steps
            if self._place.is_committed(job, step)
        }
        claim = f"a scan finds all {len(there)} committed checkpoints, and nothing else"
        self._narrator.check(claim, found == there, f"{sorted(found ^ there)[:3]}")
        best = client.checkpoints(root=ROOT_NAME, run="uninterrupted", sort="metric:loss").first()
        lowest = min(steps, key=lambda step: losses[step])
        self._narrator.check(
            f"the one of lowest loss of the uninterrupted job: step {lowest}, loss {losses[lowest]:.3f}",
            best is not None and (best.step, best.metrics.get("loss")) == (lowest, losses[lowest]),
            f"not {best}",
        )

    def _verify(self, client: Client) -> None:
        for job, outcome in (("run", "good"), ("damaged", "damaged")):
            one = self._checkpoint(client, f"{job}/{checkpoint_name(self._work.steps)}")
            client.wait(client.verify(one), timeout_seconds=_WAIT_SECONDS)
            seen = client.checkpoint(one).verification
            what = "the copy with the flipped bit" if job == "damaged" else "the checkpoint it was made of"
            self._narrator.check(f"a job reads every byte: {what} is {outcome}", seen == outcome, seen)

    def _convert(self, client: Client, digests: dict[str, str]) -> int:
        """A rule, a checkpoint that it is for, and the model in the hands of a user; the id of the export."""
        name = checkpoint_name(self._work.steps)
        place = {"to": "safetensors", "target_key": "exports/{name}", "drop_objects": True}
        rule = {
            "name": "export",
            "event": "checkpoint.committed",
            "condition": {"run": "released"},
            "actions": [{"kind": "convert", **place}],
        }
        client.request("POST", "/rules", body=rule)
        self._narrator.say(
            """A rule: what is committed to the run "released" becomes safetensors in "exports". A checkpoint
            is copied there, and the catalog told of it, as dcp.CheckpointManager(catalog=...) does."""
        )
        self._place.copy("run", self._work.steps, "released")
        source = client.register(f"released/{name}", root=ROOT_NAME).id
        target = _wait_for(lambda: _first_below(client, "exports/"))
        self._narrator.check(
            "the rule has converted it", target.name == name and target.format == "safetensors"
        )
        parents = [edge.parent_id for edge in client.lineage(target.id).edges if edge.child_id == target.id]
        self._narrator.check("the catalog knows what it was made of", parents == [source], f"{parents}")
        path = client.download_file(target.id, "model.safetensors", self._work.root / "model.safetensors")
        self._compare("the file that was made", path, digests)
        streamed = self._work.root / "streamed.safetensors"
        client.download(source or 0, streamed, drop_objects=True)
        self._compare("the source, made into one file while it is sent", streamed, digests)
        return int(target.id)

    def _look(self, client: Client, url: str, export: int) -> None:
        """At the pages of all that."""
        name = checkpoint_name(self._work.steps)
        of_run, damaged = (
            client.checkpoint(self._checkpoint(client, f"{job}/{name}")) for job in ("run", "damaged")
        )
        runs = {*JOBS, "released", "exports"}
        PagesAct(url, self._narrator).tell(runs, of_run, damaged, client.checkpoint(export))

    def _compare(self, what: str, path: Path, digests: dict[str, str]) -> None:
        found = digests_of_safetensors(path)
        wanted = {name: value for name, value in digests.items() if name in found}
        difference = compare_digests(wanted, found)
        missing = [name for name in digests if name.startswith("app.model.") and name not in found]
        self._narrator.check(
            f"downloaded, {what}: all {len(found)} tensors are bit for bit what the job saved",
            not difference and not missing,
            difference or f"{missing[:3]} are not there",
        )

    def _checkpoint(self, client: Client, key: str) -> int:
        for one in client.checkpoints(root=ROOT_NAME, state="any"):
            if one.key == key:
                return one.id
        raise DemoError(f"the catalog does not know {key}")


def digests_of_safetensors(path: Path) -> dict[str, str]:
    """As `dcp.demo.training.digests` makes them, read with nothing but the specification of the format."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        shape = tuple(entry["shape"])
        digest = hashlib.sha256(f"torch.{_DTYPES.get(entry['dtype'], entry['dtype'])} {shape} ".encode())
        digest.update(data[begin:end])
        found[name] = digest.hexdigest()
    return found


def _first_below(client: Client, prefix: str) -> Any:
    """Found by its key: the run is not known to the catalog before it has a checkpoint."""
    found = client.checkpoints(root=ROOT_NAME)
    return next((one for one in found if one.key.startswith(prefix)), None)


def _wait_for(look: Callable[[], T | None]) -> T:
    give_up = time.monotonic() + _WAIT_SECONDS
    while (found := look()) is None:
        if time.monotonic() > give_up:
            raise DemoError(f"the rule has made nothing within {_WAIT_SECONDS:g} seconds")
        time.sleep(0.1)
    return found

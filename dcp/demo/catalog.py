"""Last chapter of the demo: the checkpoints in a catalog, served by ``dcp serve``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Final, Self

import httpx
from safetensors.torch import load_file

from dcp.demo.checks import Narrator, compare_digests
from dcp.demo.places import TRAINING, DemoError, FolderPlace, Place, checkpoint_name, environ_of
from dcp.server.client import Client, ClientError

_JOBS: Final = ("uninterrupted", "run", "on-1-rank", "on-3-ranks", "damaged")
"""Jobs with checkpoints, and a copy."""

_ROOT_NAME: Final = "checkpoints"
_WAIT_SECONDS: Final = 240.0
_READY_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 60.0


class CatalogService:
    """Context manager that runs ``dcp serve`` over all checkpoints of the demo, with the database in
    ``folder``.

    The service finds ``folder``/checkpoints by itself; a bucket is passed explicitly.
    """

    def __init__(self, folder: Path, place: Place) -> None:
        log = folder / "logs" / "catalog.txt"
        environment = environ_of(place.environment)
        environment = {n: value for n, value in environment.items() if not n.startswith("DCP_SERVER_")}
        if not isinstance(place, FolderPlace):
            environment["DCP_SERVER_ROOTS"] = json.dumps({_ROOT_NAME: {"url": place.base}})
        begun = time.monotonic()
        with log.open("wb") as output:
            command = [sys.executable, "-m", "dcp", "serve", "--port", "0"]
            self._process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        # the service logs its address when ready
        while not (found := re.search(r"http://127\.0\.0\.1:[0-9]+", said := log.read_text())):
            if self._process.poll() is not None or time.monotonic() - begun > _READY_SECONDS:
                self.stop()
                raise DemoError(f"dcp serve is not ready:\n{said[-2_000:]}")
            time.sleep(0.05)
        self.url, self.ready_seconds = found[0], time.monotonic() - begun
        self.wait = self._process.wait
        """Wait for the end of the service and return the exit status; Ctrl-C ends both
        (KeyboardInterrupt).
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """Stop the service and return its exit status, negative if killed. Idempotent."""
        self._process.terminate()
        try:
            return self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class CatalogAct:
    """Chapter that serves, finds, verifies, converts and downloads checkpoints, with every claim checked."""

    def __init__(self, root: Path, place: Place, narrator: Narrator, steps: range) -> None:
        self._root, self._place, self._narrator, self._steps = root, place, narrator, steps

    def tell(
        self, digests: dict[str, str], losses: Mapping[int, float], until_end: ExitStack
    ) -> CatalogService:
        """Run the chapter and return the service, which runs ``until_end``.

        ``digests`` are of the last saved step of the job "run", ``losses`` by step those of the job
        "uninterrupted".
        """
        self._narrator.chapter("Serve all runs in a catalog")
        how = "without configuration" if isinstance(self._place, FolderPlace) else "with --root BUCKET only"
        self._narrator.say(
            f"""dcp serve {how}: a catalog of the checkpoints in an SQLite database, an API on localhost,
            and a worker for jobs."""
        )
        service = until_end.enter_context(CatalogService(self._root, self._place))
        self._narrator.say(f"dcp serve was ready after {service.ready_seconds:.1f} s, at {service.url}.")
        # a transport of its own bypasses proxies
        with Client(service.url, transport=httpx.HTTPTransport()) as client:
            try:
                self._find(client, losses)
                self._verify(client)
                self._convert(client, digests)
            except ClientError as error:
                raise DemoError(f"the catalog: {error}") from error
        return service

    def _find(self, client: Client, losses: Mapping[int, float]) -> None:
        client.wait(client.scan(_ROOT_NAME), timeout_seconds=_WAIT_SECONDS)
        found = {one.key for one in client.checkpoints(root=_ROOT_NAME)}
        saved = [(job, step) for job in _JOBS for step in self._steps if self._place.is_committed(job, step)]
        there = {f"{job}/{checkpoint_name(step)}" for job, step in saved}
        claim = f"a scan finds all {len(there)} committed checkpoints and no others"
        self._narrator.check(claim, found == there, f"{sorted(found ^ there)[:3]}")
        best = client.checkpoints(root=_ROOT_NAME, run="uninterrupted", sort="metric:loss").first()
        lowest = min(self._steps, key=lambda step: losses[step])
        self._narrator.check(
            f"a search finds the checkpoint of lowest loss: step {lowest}, loss {losses[lowest]:.3f}",
            best is not None and (best.step, best.metrics.get("loss")) == (lowest, losses[lowest]),
            f"found {best}",
        )

    def _verify(self, client: Client) -> None:
        for job, outcome in (("run", "good"), ("damaged", "damaged")):
            one = self._checkpoint(client, f"{job}/{checkpoint_name(self._steps[-1])}")
            client.wait(client.verify(one), timeout_seconds=_WAIT_SECONDS)
            seen = client.checkpoint(one).verification
            what = "the copy with the flipped bit" if job == "damaged" else "its original"
            self._narrator.check(f"a verification job reports {what} as {outcome}", seen == outcome, seen)

    def _convert(self, client: Client, digests: dict[str, str]) -> None:
        """Create a rule, register a matching checkpoint, and compare the download."""
        name = checkpoint_name(self._steps[-1])
        place = {"to": "safetensors", "target_key": "exports/{name}", "drop_objects": True}
        rule = {
            "name": "export",
            "event": "checkpoint.committed",
            "condition": {"run": "released"},
            "actions": [{"kind": "convert", **place}],
        }
        client.request("POST", "/rules", body=rule)
        self._narrator.say(
            """A rule converts checkpoints committed to the run "released" to safetensors in "exports". To
            trigger the rule, a checkpoint is copied into that run and registered, as
            dcp.CheckpointManager(catalog=...) does."""
        )
        self._place.copy("run", self._steps[-1], "released")
        source = client.register(f"released/{name}", root=_ROOT_NAME).id
        key, give_up = f"exports/{name}", time.monotonic() + _WAIT_SECONDS
        while not (found := [one for one in client.checkpoints(root=_ROOT_NAME) if one.key == key]):
            if time.monotonic() > give_up:
                raise DemoError(f"the rule has not created {key} within {_WAIT_SECONDS:g} seconds")
            time.sleep(0.1)
        target = found[0]
        self._narrator.check("the rule has converted the checkpoint", target.format == "safetensors")
        parents = [edge.parent_id for edge in client.lineage(target.id).edges if edge.child_id == target.id]
        self._narrator.check("the catalog records the source", parents == [source], f"found {parents}")
        path = client.download_file(target.id, "model.safetensors", self._root / "model.safetensors")
        self._compare("the converted file", path, digests)
        streamed = self._root / "streamed.safetensors"
        client.download(source or 0, streamed, drop_objects=True)
        self._compare("the source, converted during the download", streamed, digests)

    def _compare(self, what: str, path: Path, digests: dict[str, str]) -> None:
        digest_of = import_module(TRAINING).digest_of
        found = {name: digest_of(tensor) for name, tensor in load_file(path).items()}
        wanted = {name: value for name, value in digests.items() if name in found}
        difference = compare_digests(wanted, found)
        missing = [name for name in digests if name.startswith("app.model.") and name not in found]
        self._narrator.check(
            f"downloaded, {what}: all {len(found)} tensors equal the saved ones bit for bit",
            not difference and not missing,
            difference or f"missing: {missing[:3]}",
        )

    def _checkpoint(self, client: Client, key: str) -> int:
        for one in client.checkpoints(root=_ROOT_NAME, state="any"):
            if one.key == key:
                return one.id
        raise DemoError(f"the catalog has no checkpoint {key}")

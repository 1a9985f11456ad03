"""`python -m benchmarks`: run the workloads, print the table, write the table and all samples to a folder."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from benchmarks.processes import BenchmarkError, Progress, run_ranks

_WORKLOADS = (
    "W1",
    "W1-opt",
    "W2",
    "W3",
    "R1",
    "memory",
    "async",
    "async-W4",
    "loop",
    "plan",
    "digests",
    "device",
    "s3",
    "convert",
)
_BY_NAME_ONLY = ("async-W1-opt", "async-W2")
_MEMORY_WORKLOADS = ("W1", "W2", "W3")
_OBJECT_WORKLOADS = ("W1", "W2")
_OBJECT_SAVES = 7
"""W1 checkpoints on the server at a time: one per contender, the timed one, one still being removed."""
_ASYNC_RANKS = (1, 2)
_ASYNC_LIVES = 3


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default=",".join(_WORKLOADS), help="comma-separated: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of all contenders: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the workloads: %(default)s")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the multi-rank rows: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="results: %(default)s")
    parser.add_argument(
        "--tmp", type=Path, default=None, help="folder for temporary checkpoints, removed at the end"
    )
    parser.add_argument(
        "--mergekit", default="", metavar="PYTHON", help="a Python with mergekit, for the last row of convert"
    )
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    there_are = (*_WORKLOADS, *_BY_NAME_ONLY)
    unknown = set(options.only) - set(there_are)
    if unknown:
        parser.error(f"unknown workload: {', '.join(sorted(unknown))}; choose from {', '.join(there_are)}")
    if options.rounds < 1 or options.scale <= 0 or options.ranks not in (1, 2, 4, 8):
        parser.error("--rounds must be at least 1, --scale above 0, --ranks 1, 2, 4 or 8")
    return options


class _Suite:
    """Run the chosen workloads one after the other, each in new processes and a new folder."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        from benchmarks.peers import not_installed
        from benchmarks.report import environment

        self._facts = environment(folder)
        self._begun = time.monotonic()
        self._left_out = not_installed(options.only)
        if self._left_out:
            self._say("others")(f"left out, not installed: {', '.join(self._left_out)}")
        self.rows: list[Any] = []
        self.measured: list[Any] = []

    def run(self) -> None:
        """Fill `rows` and `measured`."""
        for workload in self._options.only:
            if workload == "R1":
                self._reshard()
            elif workload == "memory":
                self._memory()
            elif workload.startswith("async"):
                self._save_asynchronously(workload.partition("-")[2] or "W1")
            elif workload == "loop":
                self._train()
            elif workload == "plan":
                self._plan()
            elif workload == "digests":
                self._digest()
            elif workload == "device":
                self._stage_from_device()
            elif workload == "s3":
                self._object_store()
            elif workload == "convert":
                self._convert()
            else:
                self._save_and_load(workload)
            self._write(partial=workload != self._options.only[-1])

    def _write(self, *, partial: bool) -> None:
        """Write the results after each workload, so that an interrupted run keeps them."""
        from benchmarks.report import markdown, to_json

        options, out = self._options, self._options.out
        chosen = {"rounds": options.rounds, "scale": options.scale, "only": ",".join(options.only)}
        chosen["seconds"] = round(time.monotonic() - self._begun, 1)
        chosen["complete"] = "no" if partial else "yes"
        if self._left_out:
            chosen["not installed"] = ", ".join(self._left_out)
        out.mkdir(parents=True, exist_ok=True)
        text = markdown(self.rows, self._facts, chosen)
        (out / "benchmarks.md").write_text(text)
        (out / "benchmarks.json").write_text(to_json(self.rows, self._facts, chosen, self.measured))
        if not partial:
            print(text)
            print(f"written to {out}/benchmarks.md and benchmarks.json", file=sys.stderr)

    def _say(self, what: str) -> Progress:
        def progress(text: str) -> None:
            print(f"[{time.monotonic() - self._begun:6.1f} s] {what}: {text}", file=sys.stderr, flush=True)

        return progress

    def _own_folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(dir=self._folder, prefix="job-")

    def _save_and_load(self, workload: str) -> None:
        from benchmarks.rounds import OPERATIONS, Spec, measure
        from benchmarks.targets import peer_rows, save_load_row

        options = self._options
        for ranks in sorted({1, options.ranks}) if workload != "W2" else (1,):
            operations = OPERATIONS if ranks == 1 else ("save durable", "save", "load warm")
            with self._own_folder() as name:
                spec = Spec(workload, options.scale, options.rounds, operations, Path(name))
                say = self._say(f"{workload}, {ranks} rank{'s' if ranks > 1 else ''}")
                results = run_ranks(ranks, measure, spec, progress=say, folder=self._folder)[0]
            self.measured += results
            self.rows += [row for result in results for row in (save_load_row(result), *peer_rows(result))]

    def _reshard(self) -> None:
        from benchmarks.resharding import CASES, SAVING_RANKS, load_resharded, save_for_resharding
        from benchmarks.targets import reshard_row

        options = self._options
        with self._own_folder() as name:
            folder, run = Path(name), partial(run_ranks, folder=self._folder)
            say = self._say("R1")
            run(SAVING_RANKS, save_for_resharding, options.scale, folder, progress=say)
            for ranks, dim in CASES:
                arguments = (options.scale, options.rounds, dim, folder)
                say = self._say(f"R1, {ranks} ranks, dim {dim}")
                result = run(ranks, load_resharded, *arguments, progress=say)[0]
                self.measured.append(result)
                self.rows.append(reshard_row(result))

    def _memory(self) -> None:
        from benchmarks.machine.memory import peak_mebibytes
        from benchmarks.targets import memory_row
        from benchmarks.workloads import tensor_specs, total_bytes

        for workload in _MEMORY_WORKLOADS:
            peaks = self._peaks(peak_mebibytes, f"memory, {workload}", workload, ("ours", "stock"))
            gigabytes = total_bytes(tensor_specs(workload, self._options.scale)) / 1e9
            for operation in ("save", "load"):
                ours, stock = peaks["ours"][operation], peaks["stock"][operation]
                self.rows.append(memory_row(workload, operation, gigabytes, ours, stock))

    def _peaks(
        self, measure: Callable[..., dict[str, float]], what: str, workload: str, sides: Sequence[str]
    ) -> dict[str, dict[str, float]]:
        """Return MiB by contender and figure; each contender runs in a process of its own."""
        peaks: dict[str, dict[str, float]] = {}
        for side in sides:
            with self._own_folder() as name:
                say = self._say(f"{what}, {side}")
                arguments = (workload, self._options.scale, side, Path(name))
                (peaks[side],) = run_ranks(1, measure, *arguments, progress=say, folder=self._folder)
                say(", ".join(f"{name} {value:.0f} MiB" for name, value in peaks[side].items()))
        return peaks

    def _save_asynchronously(self, workload: str) -> None:
        from benchmarks.asynchronous.saving import (
            CONTENDERS,
            AsyncSpec,
            async_peers,
            merge_lives,
            save_in_one_life,
        )
        from benchmarks.targets import async_row, peer_rows

        options = self._options
        lives = min(_ASYNC_LIVES, options.rounds)
        for ranks in sorted({min(ranks, options.ranks) for ranks in _ASYNC_RANKS}):
            say = self._say(f"async, {workload}, {ranks} rank{'s' if ranks > 1 else ''}")
            samples, contenders = [], (*CONTENDERS, *async_peers(workload, ranks))
            for life in range(lives):
                with self._own_folder() as name:
                    later_saves = -(-options.rounds // lives)
                    spec = AsyncSpec(workload, options.scale, later_saves, life, Path(name), contenders)
                    arguments = (ranks, save_in_one_life, spec)
                    run = run_ranks(*arguments, progress=say, folder=self._folder, daemon=False)
                    samples.append(run[0])
            merged = merge_lives(samples)
            self.measured += merged
            for result in merged:
                for kind in ("thread", "process"):
                    self.rows += [async_row(result, kind), *peer_rows(result, kind)]
        self._asynchronous_memory(workload)

    def _asynchronous_memory(self, workload: str) -> None:
        from benchmarks.asynchronous.saving import peak_async_mebibytes
        from benchmarks.targets import async_memory_row
        from benchmarks.workloads import tensor_specs, total_bytes

        sides = ("ours_thread", "ours_process", "stock")
        found = self._peaks(peak_async_mebibytes, f"async, {workload}, memory", workload, sides)
        gigabytes = total_bytes(tensor_specs(workload, self._options.scale)) / 1e9
        for kind in ("thread", "process"):
            for figure in ("peak", "kept"):
                operation = f"async_save, {figure} memory, {kind} writer"
                ours, stock = found[f"ours_{kind}"][figure], found["stock"][figure]
                self.rows.append(async_memory_row(workload, operation, gigabytes, ours, stock))

    def _train(self) -> None:
        from benchmarks.asynchronous.training_loop import LoopSpec, train
        from benchmarks.targets import loop_rows

        with self._own_folder() as name:
            spec = LoopSpec(self._options.scale, self._options.rounds, Path(name))
            say = self._say("loop")
            (result,) = run_ranks(1, train, spec, progress=say, folder=self._folder, daemon=False)
        self.measured.append(result)
        self.rows += loop_rows(result)

    def _plan(self) -> None:
        from benchmarks.plans.plan_cache import LAYOUTS, TENSORS, PlanSpec, plan_again
        from benchmarks.targets import plan_row

        tensors = max(8, round(TENSORS * self._options.scale))
        for layout in LAYOUTS:
            with self._own_folder() as name:
                spec = PlanSpec(layout, tensors, self._options.rounds, Path(name))
                say = self._say(f"plan, {layout}")
                arguments = (self._options.ranks, plan_again, spec)
                results = run_ranks(*arguments, progress=say, folder=self._folder)[0]
            self.measured += results
            self.rows += [plan_row(result) for result in results]

    def _digest(self) -> None:
        from benchmarks.digests import WORKLOADS, DigestsSpec, digests_row, save_with_digests

        for workload in WORKLOADS:
            with self._own_folder() as name:
                spec = DigestsSpec(workload, self._options.scale, self._options.rounds, Path(name))
                say = self._say(f"digests, {workload}")
                (results,) = run_ranks(1, save_with_digests, spec, progress=say, folder=self._folder)
            self.measured += results
            self.rows += [digests_row(result) for result in results]

    def _stage_from_device(self) -> None:
        from benchmarks.asynchronous.device_staging import DeviceSpec, accelerator, stage_from_device
        from benchmarks.targets import device_row

        say = self._say("device")
        device = accelerator()
        if device is None:
            say("torch finds no accelerator: nothing is measured; run this workload on a machine with a GPU")
            return
        with self._own_folder() as name:
            spec = DeviceSpec("W1", self._options.scale, self._options.rounds, Path(name), device)
            (results,) = run_ranks(1, stage_from_device, spec, progress=say, folder=self._folder)
        self.measured += results
        self.rows += [device_row(result) for result in results]

    def _convert(self) -> None:
        from benchmarks.converting.conversion import (
            CASES,
            MERGEKIT,
            SAVING_RANKS,
            conversion_rows,
            measure_conversion,
            save_for_conversion,
        )

        options = self._options
        with self._own_folder() as name:
            arguments = (options.scale, Path(name))
            say = self._say("convert")
            run_ranks(SAVING_RANKS, save_for_conversion, *arguments, progress=say, folder=self._folder)
            for case, (_, contender) in CASES.items():
                if contender == MERGEKIT and not options.mergekit:
                    self._left_out.append("mergekit (give --mergekit)")
                    continue
                measured, peaks = measure_conversion(case, Path(name), options.rounds, say, options.mergekit)
                self.measured.append(measured)
                self.rows += conversion_rows(measured, peaks)

    def _object_store(self) -> None:
        from benchmarks.s3.service import S3Service
        from benchmarks.s3.store import not_installed
        from dcp.demo.s3_server import S3Server, S3ServerError

        with self._own_folder() as name:
            server = S3Server(Path(name) / "s3", volume_limit_bytes=1 << 30)
            try:
                server.start()
            except S3ServerError as error:
                raise BenchmarkError(str(error)) from error
            try:
                service = S3Service(server.environment, server.pid)
                self._left_out += not_installed(service)
                for workload in _OBJECT_WORKLOADS:
                    self._save_and_load_objects(workload, service)
                self._reshard_objects(service)
            finally:
                server.stop()

    def _save_and_load_objects(self, workload: str, service: Any) -> None:
        from benchmarks.s3.rows import client_row, object_row
        from benchmarks.s3.store import ObjectSpec, measure_objects

        spec = ObjectSpec(workload, self._options.scale, self._options.rounds, service)
        say = self._say(f"s3, {workload}")
        (results,) = run_ranks(1, measure_objects, spec, progress=say, folder=self._folder)
        self.measured += results
        rows = [make(result) for make in (object_row, client_row) for result in results]
        self.rows += [row for row in rows if row is not None]

    def _reshard_objects(self, service: Any) -> None:
        from benchmarks.s3.rows import object_reshard_row
        from benchmarks.s3.service import Buckets
        from benchmarks.s3.store import (
            CASES,
            SAVING_RANKS,
            ObjectSpec,
            load_resharded_objects,
            save_for_resharding_objects,
        )

        options, run = self._options, partial(run_ranks, folder=self._folder)
        spec = ObjectSpec("W1", options.scale, options.rounds, service)
        buckets = Buckets(service, "r1")
        kept = {side: buckets.make() for side in ("ours", "stock")}
        buckets.close()
        arguments = (options.scale, service, kept)
        run(SAVING_RANKS, save_for_resharding_objects, *arguments, progress=self._say("s3, R1"))
        for ranks, dim in CASES:
            say = self._say(f"s3, R1, {ranks} ranks, dim {dim}")
            result = run(ranks, load_resharded_objects, spec, dim, kept, progress=say)[0]
            self.measured.append(result)
            self.rows.append(object_reshard_row(result))


def _needed_bytes(options: argparse.Namespace) -> int:
    """Return the disk space for the checkpoints of all contenders and one more save."""
    from benchmarks.peers import PEER_WORKLOADS, PEERS
    from benchmarks.workloads import STATE_BYTES

    def needed(workload: str) -> float:
        if workload == "s3":
            return _OBJECT_SAVES * STATE_BYTES["W1"]
        if workload == "convert":
            return 12.5 * STATE_BYTES["W1"]
        if workload in PEER_WORKLOADS:
            return (3.2 + len(PEERS)) * STATE_BYTES[workload]
        return 3.2 * STATE_BYTES.get(workload.removeprefix("async-"), STATE_BYTES["W3"])

    return int(max(map(needed, options.only)) * options.scale) + (64 << 20)


def _terminated(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; return 0 if done, 2 for wrong options or too little space, 3 if a rank failed,
    130 if interrupted."""
    options = _parse(arguments)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        with tempfile.TemporaryDirectory(prefix="dcp-bench-", dir=options.tmp) as name:
            folder = Path(name)
            free = shutil.disk_usage(folder).free
            if free < _needed_bytes(options):
                needed = _needed_bytes(options)
                print(
                    f"{name} has {free >> 20} MiB free, {needed >> 20} are needed: give --tmp",
                    file=sys.stderr,
                )
                return 2
            _Suite(options, folder).run()
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("interrupted; the checkpoints are removed", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())

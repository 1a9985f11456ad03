"""Chapters of the demo. Every claim is checked; the exit status is 0 only if all are true."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp.demo.checks import Narrator, compare_digests, largest_difference
from dcp.demo.places import (
    LONGEST_SECONDS,
    TRAINING,
    BucketPlace,
    DemoError,
    FolderPlace,
    JobOutcome,
    Place,
    checkpoint_name,
    environ_of,
    run_or_kill,
)
from dcp.demo.s3_server import S3Server, S3ServerError
from dcp.storage.formats.opening import open_index

if TYPE_CHECKING:
    from dcp.demo.catalog import CatalogService

RESHARDED_LOSS_TOLERANCE = 0.001
"""Tolerance between runs on different numbers of ranks, which add in another order; measured 1e-6 at losses
of 2 to 5.
"""

_COMMIT_SECONDS = 60.0
_CORPUS_CHARACTERS = 400_000
_SHOWN_LOG_LINES = 40


class Story:
    """Run of the demo in a folder; ``service`` runs ``until_end`` or `end_catalog`."""

    def __init__(self, root: Path, place: Place, save_every: int, until_end: ExitStack) -> None:
        self.service: CatalogService | None = None
        self._until_end = until_end
        self.narrator = Narrator()
        self.root, self.place = root, place
        self.steps, self.save_every = 4 * save_every, save_every
        self.killed_step = 3 * save_every
        self.last_step = 2 * save_every

    def tell(self) -> None:
        """Run all chapters in order. Raises DemoError if a required job fails."""
        characters = self._write_corpus()
        where = f"Folder: {self.root}"
        if not isinstance(self.place, FolderPlace):
            where = f"Checkpoints go to an S3 server (SeaweedFS), stopped at the end. Logs: {self.root}"
        self.narrator.say(
            f"""A transformer of 2.8 million parameters is trained on the source code of this package
            ({characters:,} characters), with FSDP2 on CPU processes, started as torchrun does. A
            dcp.CheckpointManager saves model, AdamW state, step and each rank's random generator in the
            background. The demo takes a minute or two. {where}"""
        )
        reference = self.train_without_interruption()
        killed = self.kill_in_a_save(reference)
        self.find_last_checkpoint()
        resumed = {2: self.resume_and_kill(reference, killed)}
        resumed |= self.resume_on_other_numbers(reference, killed)
        self.compare_curves(reference, killed, resumed)
        self.use_the_command_line()
        self.flip_a_bit()
        self.read_with_stock_torch(resumed)
        self.serve_a_catalog(reference, resumed)

    # -- chapters --------------------------------------------------------------------------------------------

    def train_without_interruption(self) -> JobOutcome:
        """Train the reference run."""
        self.narrator.chapter("Train without interruption, on 2 ranks")
        reference = self._train("uninterrupted", 2, checkpoints="uninterrupted")
        first, last = reference.losses[1], reference.losses[self.steps]
        self.narrator.check(
            f"the loss falls from {first:.3f} at the first step to {last:.3f} at the last",
            last < 0.8 * first,
            "expected a decrease by 20 % at least",
        )
        return reference

    def kill_in_a_save(self, reference: JobOutcome) -> JobOutcome:
        """Train the same run, and kill a save."""
        step, place = self.killed_step, self.place
        self.narrator.chapter(f"Train again, and kill the job in the middle of the save of step {step}")
        killed = self._train("killed", 2, checkpoints="run", stop=(step, "writing"))
        last = max(killed.losses, default=0)
        died = killed.exit_code == -signal.SIGKILL and last >= step
        self.narrator.check(
            f"kill -9 ended the launcher and both ranks while step {step} was saved in the background",
            died,
            f"exit code {killed.exit_code}, last step {last}",
        )
        files = place.data_files("uninterrupted", step)
        whole = {name.split(".")[0]: size for name, size in files.items()}
        halves = sorted(place.leftovers("run", step).items())
        sizes = [(name, size, whole[name.split(".")[0]]) for name, size in halves]
        left = place.shown(f"run/{checkpoint_name(step)}")
        self.narrator.say(f"The killed save left {place.about_leftovers} in {left}:")
        rows = [(name, f"{size:,}", f"{full:,}") for name, size, full in sizes]
        self.narrator.table(("file", "bytes", "bytes when complete"), *rows)
        count = sum(0 < size < full for _, size, full in sizes)
        self.narrator.check(f"both ranks' {place.leftover}", count == 2, f"found {count}")
        self.narrator.check(
            f"step {step} does not count as a checkpoint", not place.is_committed("run", step)
        )
        self._check_equal(
            f"losses of steps 1 to {last} equal those of the uninterrupted run bit for bit",
            largest_difference(reference.losses, killed.losses, range(1, last + 1)),
        )
        return killed

    def find_last_checkpoint(self) -> None:
        """Find the checkpoint to resume from."""
        name, half = checkpoint_name(self.last_step), checkpoint_name(self.killed_step)
        self.narrator.chapter("Find the newest committed checkpoint")
        listing = self._dcp("ls", self.place.shown("run"))
        killed = self.place.shown(f"run/{half}")
        self._dcp("verify", killed, status=3, claim=f"dcp verify refuses {half}")
        found = self.place.newest("run")
        words = [line.split() for line in listing.splitlines() if line.startswith("step-")]
        known = {"committed", "incomplete"}
        states = {name: next(iter(known.intersection(row)), "") for name, *row in words}
        wanted = self.place.state_of_killed
        self.narrator.check(
            f"dcp ls lists {name} as committed, {half} {f'as {wanted}' if wanted else 'not at all'}",
            states.get(half) == wanted and states.get(name) == "committed",
            repr(states),
        )
        self.narrator.check(
            f"the newest committed checkpoint is {name}, and dcp verify finds no damage",
            found == name,
            f"found {found}",
        )

    def resume_and_kill(self, reference: JobOutcome, killed: JobOutcome) -> JobOutcome:
        """Resume on the same number of ranks, with writer processes that outlive the job."""
        last, place = self.steps, self.place
        self.narrator.chapter(
            f"Resume from step {self.last_step}, and kill the job just after step {last} was staged"
        )
        self.narrator.say(
            """This time each rank saves in a separate writer process. Both ranks and their launcher are
            killed as soon as both have sent the staged copies of the last step to their writers."""
        )
        stop = (last, "staged")
        job = self._train("resumed-on-2", 2, checkpoints="run", writer="process", stop=stop)
        self._check_loaded(2, killed, job)
        died = job.exit_code == -signal.SIGKILL and max(job.losses, default=0) == last
        self.narrator.check(f"kill -9 ended the job at step {last}", died, f"exit code {job.exit_code}")
        give_up = time.monotonic() + _COMMIT_SECONDS
        while not (committed := place.is_committed("run", last)) and time.monotonic() < give_up:
            time.sleep(0.05)
        self.narrator.check("the writer processes committed the checkpoint after the kill", committed)
        self._check_same_number(reference, job)
        return job

    def resume_on_other_numbers(self, reference: JobOutcome, killed: JobOutcome) -> dict[int, JobOutcome]:
        """Resume from the same step on fewer and more ranks."""
        self.narrator.chapter(f"Resume from step {self.last_step} on 1 and on 3 ranks")
        jobs = {}
        for ranks, where in ((1, "on-1-rank"), (3, "on-3-ranks")):
            # the manager resumes from the newest step of the job's folder
            self.place.copy("run", self.last_step, where)
            jobs[ranks] = job = self._train(f"resumed-on-{ranks}", ranks, checkpoints=where)
            self._check_loaded(ranks, killed, job)
            self._check_other_number(ranks, reference, job)
        return jobs

    def compare_curves(
        self, reference: JobOutcome, killed: JobOutcome, resumed: dict[int, JobOutcome]
    ) -> None:
        """Plot and print the losses."""
        self.narrator.chapter("Compare the losses of all runs")
        runs = {"uninterrupted": reference, "killed": killed}
        runs |= {f"resumed on {ranks}": job for ranks, job in resumed.items()}
        columns = [1, self.last_step, self.last_step + 1, self.killed_step, self.steps]
        rows = [
            [name, *(f"{job.losses[step]:.7f}" if step in job.losses else "" for step in columns)]
            for name, job in runs.items()
        ]
        self.narrator.table(["run", *(f"step {step}" for step in columns)], *rows)

    def use_the_command_line(self) -> None:
        """List and verify the checkpoints."""
        place, step, last = self.place, self.killed_step, self.steps
        self.narrator.chapter("List and verify the checkpoints")
        self._dcp("ls", place.shown("run"))
        saved = [("run", self.last_step), ("run", last), ("on-1-rank", last), ("on-3-ranks", last)]
        folders = [place.shown(f"{job}/{checkpoint_name(number)}") for job, number in saved]
        self._dcp("verify", *folders, status=0, claim="every byte of four checkpoints verifies")
        self.narrator.say(
            f"""The resumed job saved step {step} again, {place.about_clearing}. The save completed, and
            removed the leftovers of the killed save:"""
        )
        self._dcp("verify", place.shown(f"run/{checkpoint_name(step)}"))
        left = place.data_files("run", step) | place.leftovers("run", step)
        strays = left.keys() - set(open_index(place.store("run", step)).files)
        findings = place.findings("run", step)
        self.narrator.check(
            f"{checkpoint_name(step)} is a valid checkpoint without leftovers of the killed save",
            not findings and not strays,
            f"{findings}, {strays}",
        )

    def flip_a_bit(self) -> None:
        """Damage a copy in the middle of a tensor, with intact sizes and headers."""
        self.narrator.chapter("Flip one bit of a copy")
        last = self.steps
        self.place.copy("run", last, "damaged")
        name = self.place.flip_bit("damaged", last)
        damaged = self.place.shown(f"damaged/{checkpoint_name(last)}")
        output = self._dcp("verify", damaged, status=1, claim="dcp verify finds the damage")
        self.narrator.check(f"dcp verify names the damaged tensor: {name}", name in output)

    def read_with_stock_torch(self, resumed: dict[int, JobOutcome]) -> None:
        """Load in one process with stock torch."""
        self.narrator.chapter("Load with stock torch.distributed.checkpoint, in a single process")
        last = self.steps
        places = {2: "run", 1: "on-1-rank", 3: "on-3-ranks"}
        folders = [self.place.checkpoint(where, last) for where in ("damaged", *places.values())]
        status, output = self._run("-m", "dcp.demo.stock", *folders)
        if status:
            raise DemoError(f"the process that loads with stock torch failed:\n{output}")
        result: dict[str, Any] = json.loads(output)
        for ranks, digests in zip(places, result["stock"], strict=True):
            who = {1: "1 rank", 2: "2 ranks, committed after their kill", 3: "3 ranks"}[ranks]
            self._check_equal(
                f"saved by {who}, loaded by stock torch: all {len(digests)} entries equal bit for bit",
                compare_digests(resumed[ranks].digests(f"saved-{last}"), digests),
            )
        by_stock, by_ours = result["damaged_by_stock"], result["damaged_by_ours"]
        if isinstance(by_stock, dict):
            wrong = compare_digests(result["stock"][0], by_stock)
            by_stock = f"loads it without an error: {wrong or 'no entry differs'}"
        self.narrator.say(f"The copy with the flipped bit: stock torch {by_stock}. dcp.load raises:")
        self.narrator.output(by_ours)
        refused = by_ours.startswith("CorruptCheckpointError")
        self.narrator.check("dcp.load refuses the damaged copy", refused, by_ours)

    def serve_a_catalog(self, reference: JobOutcome, resumed: dict[int, JobOutcome]) -> None:
        """Serve the checkpoints in a catalog."""
        if any(find_spec(name) is None for name in ("fastapi", "httpx", "sqlalchemy")):
            self.narrator.chapter("Skip the catalog")
            self.narrator.say("The catalog needs more packages: pip install 'dcphub[server]'")
            return
        from dcp.demo.catalog import CatalogAct  # imported here, because the demo runs without these packages

        digests, saved = resumed[2].digests(f"saved-{self.steps}"), range(0, self.steps + 1, self.save_every)
        act = CatalogAct(self.root, self.place, self.narrator, saved[1:])
        self.service = act.tell(digests, reference.losses, self._until_end)

    def end_catalog(self) -> None:
        """Stop the catalog if running."""
        if self.service is not None:
            status = self.service.stop()
            self.narrator.check("dcp serve shut down cleanly", status == 0, f"exit status {status}")

    def serve(self) -> None:
        """Keep the catalog running until Ctrl-C or SIGTERM."""
        if self.service is None:
            return
        self.narrator.chapter("Browse the catalog")
        self.narrator.say(f"The catalog is at {self.service.url}/ until Ctrl-C.")
        try:
            self.narrator.say(f"dcp serve ended unexpectedly, with exit status {self.service.wait()}.")
        except KeyboardInterrupt:
            self.end_catalog()
            self.narrator.say("The catalog is stopped.")

    # -- shared by chapters ---------------------------------------------------------------------------------

    def _check_equal(self, claim: str, difference: float | str) -> None:
        self.narrator.check(claim, not difference, f"they differ: {difference}")

    def _check_loaded(self, ranks: int, killed: JobOutcome, job: JobOutcome) -> None:
        """Compare the loaded state of the ranks with the saved state of the killed job."""
        step = self.last_step
        saved, loaded = killed.digests(f"saved-{step}"), job.digests(f"loaded-{step}")
        # a rank's generator is comparable only for the same number of ranks
        difference = compare_digests(saved, loaded, without="" if ranks == 2 else "rng.")
        what = "model, AdamW state, step" + (" and both random generators" if ranks == 2 else "")
        on = _ranks_text(ranks)
        self._check_equal(f"on {on}: {what} loaded bit for bit as saved", difference)
        first = min(job.losses, default=0)
        self.narrator.check(f"on {on}: training continues with step {first}", first == step + 1)

    def _check_same_number(self, reference: JobOutcome, job: JobOutcome) -> None:
        """Compare with the reference run: equal bit for bit on the same number of ranks."""
        steps = range(self.last_step + 1, self.steps + 1)
        name = f"saved-{self.steps}"
        self._check_equal(
            "on 2 ranks: losses equal those of the uninterrupted run bit for bit",
            largest_difference(reference.losses, job.losses, steps),
        )
        self._check_equal(
            "on 2 ranks: random numbers equal those of the uninterrupted run",
            largest_difference(reference.looks, job.looks, steps),
        )
        self._check_equal(
            f"on 2 ranks: the state after step {self.steps} equals that of the uninterrupted run bit for bit",
            compare_digests(reference.digests(name), job.digests(name)),
        )

    def _check_other_number(self, ranks: int, reference: JobOutcome, job: JobOutcome) -> None:
        """Compare losses, which differ in the last bits on other numbers of ranks."""
        steps = range(self.last_step + 1, self.steps + 1)
        apart = largest_difference(reference.losses, job.losses, steps)
        self.narrator.check(
            f"on {_ranks_text(ranks)}: losses equal those of the uninterrupted run within "
            f"{RESHARDED_LOSS_TOLERANCE:g} (largest difference {apart:.1e}; sums over another number of "
            "ranks round differently)",
            apart <= RESHARDED_LOSS_TOLERANCE,
        )

    def _write_corpus(self) -> int:
        """Copy the source of this package as training text, common to all runs of a demo; return the number
        of characters.
        """
        package = Path(__file__).parents[1]
        # the layers are links in a checkout, which rglob does not follow before Python 3.13
        folders = (package, package / "planners", package / "storage")
        sources = {path.resolve() for folder in folders for path in folder.rglob("*.py") if path.is_file()}
        text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(sources))
        data = text.encode("ascii", errors="ignore")[:_CORPUS_CHARACTERS]
        return (self.root / "corpus.txt").write_bytes(data)

    def _train(
        self,
        name: str,
        ranks: int,
        *,
        checkpoints: str,
        writer: str = "thread",
        stop: tuple[int, str] | None = None,
    ) -> JobOutcome:
        """Run a training job, like torchrun, to the end, or kill it where all ranks ``stop``.

        The job resumes from the newest valid checkpoint, and saves in the background, in a thread or in a
        ``writer`` process per rank.

        Raises:
            DemoError: If the job fails or takes over five minutes, with the end of the log.
        """
        self.narrator.say(f"Starting {_ranks_text(ranks)} with torch.multiprocessing ...")
        training = import_module(TRAINING)
        results, log = self.root / "results" / name, self.root / "logs" / f"{name}.txt"
        results.mkdir(parents=True)
        log.parent.mkdir(exist_ok=True)
        where, corpus = f"{self.place.base}/{checkpoints}", self.root / "corpus.txt"
        job = training.TrainingJob(corpus, where, results, self.steps, self.save_every, writer, stop)
        begun = time.monotonic()
        exit_code = run_or_kill(training.launch, job, ranks, environ_of(self.place.environment), log)
        if exit_code != 0 and stop is None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LOG_LINES:])
            raise DemoError(f"the job {name!r} failed with exit code {exit_code}:\n{tail}")
        losses = results / "losses.jsonl"
        said = losses.read_text() if losses.exists() else ""
        # the last line may be half written, by a rank that was killed
        lines = [json.loads(line) for line in said.splitlines(keepends=True) if line.endswith("\n")]
        found = [{line["step"]: line[key] for line in lines} for key in ("loss", "looks")]
        by_loss, seconds = found[0], time.monotonic() - begun
        done = f"steps {min(by_loss, default=0)} to {max(by_loss, default=0)} in {seconds:.0f} s"
        self.narrator.say(f"{name}: {done}")
        return JobOutcome(exit_code, results, by_loss, found[1])

    def _run(self, *arguments: str) -> tuple[int, str]:
        """Run ``python ARGUMENTS`` in the folder of relative checkpoints; return exit status and output.

        Raises:
            DemoError: After five minutes.
        """
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=self.place.folder if isinstance(self.place, FolderPlace) else self.root,
                env=environ_of(self.place.environment),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                timeout=LONGEST_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"{' '.join(arguments)} took longer than {LONGEST_SECONDS:g} seconds") from error
        return done.returncode, done.stdout

    def _dcp(self, *arguments: str, status: int | None = None, claim: str = "") -> str:
        """Run and show a dcp command; ``claim`` requires the exit status ``status``."""
        ended, output = self._run("-m", "dcp", *arguments)
        shown = output if not ended else f"{output.rstrip()}\n(exit status {ended})"
        self.narrator.output(shown, f"dcp {' '.join(arguments)}")
        if status is not None:
            self.narrator.check(claim, ended == status, f"exit status {ended}")
        return output


def _ranks_text(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


# -- the command ---------------------------------------------------------------------------------------------


def run_to_exit_status(root: Path | None, save_every: int, on_s3: bool = False, serve: bool = False) -> int:
    """Run the demo and return the exit status.

    Args:
        root: Empty or new folder; by default a temporary folder.
        save_every: Steps between saves.
        on_s3: Save to a local S3 server, stopped at the end.
        serve: Keep the catalog running until Ctrl-C if all checks passed.

    Returns:
        0 if all checks passed, 1 if a check or job failed, 2 for wrong use, 128 plus the number of a
            signal.
    """
    # An exception, to end the training job and remove the folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with ExitStack() as until_end:
            folder = _folder(root, serve, until_end)
            return _tell(folder, root is not None, save_every, on_s3, serve, until_end)
    except (S3ServerError, DemoError) as error:
        print(f"dcp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndcp: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _folder(root: Path | None, serve: bool, until_end: ExitStack) -> Path:
    if find_spec("torch") is None:
        raise DemoError("the demo trains a model and needs torch: pip install 'dcphub[torch]'")
    if serve and find_spec("fastapi") is None:
        raise DemoError("the catalog needs more packages: pip install 'dcphub[server]'")
    if root is None:
        root = Path(until_end.enter_context(tempfile.TemporaryDirectory(prefix="dcp-demo-")))
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        raise DemoError(f"--root {root} is not empty: give a new or empty folder")
    return root.resolve()


def _tell(root: Path, is_kept: bool, save_every: int, on_s3: bool, serve: bool, until_end: ExitStack) -> int:
    begun = time.monotonic()
    place: Place
    if on_s3:
        place = BucketPlace(until_end.enter_context(S3Server(root / "s3", bucket="dcp-demo")))
    else:
        place = FolderPlace(root / "checkpoints")
        place.folder.mkdir()
    story = Story(root, place, save_every, until_end)
    narrator = story.narrator
    try:
        story.tell()
        if not serve:
            story.end_catalog()
    except DemoError as error:
        narrator.check("all parts of the demo run", False, str(error))
    narrator.chapter("Summary")
    seconds = time.monotonic() - begun
    if narrator.failed:
        for claim in narrator.failed:
            narrator.say(f"FAILED: {claim}")
        narrator.say(f"{len(narrator.failed)} of {narrator.claims} checks failed, after {seconds:.0f} s.")
        return 1
    narrator.say(
        """A job killed during a save loses only the steps since its last checkpoint: the half-written save
        does not count as a checkpoint, and on the same number of ranks training continues bit for bit as
        without interruption. The same checkpoint loads bit for bit on fewer and on more ranks. With writer
        processes, a step that was staged before the kill is still committed. Stock torch reads checkpoints
        written by dcp. dcp detects a flipped bit and names the tensor."""
    )
    narrator.say(f"All {narrator.claims} checks passed, in {seconds:.0f} s.")
    if serve:
        story.serve()
        return 1 if narrator.failed else 0
    if not is_kept:
        what = "logs" if on_s3 else "checkpoints"
        narrator.say(f"The {what} are removed. dcp demo --root DIR keeps them; --serve shows a catalog.")
    elif not on_s3:
        narrator.say(f"To see the runs in a browser: cd {shlex.quote(str(root))} && dcp serve")
    return 0

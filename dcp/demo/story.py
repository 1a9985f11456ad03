"""The demo's story, chapter by chapter. Every claim is checked; the exit status is 0 only if all hold.

Torch-free: what needs torch runs in processes of its own, as it would in real life.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dcp.demo.checks import Checks, compare_digests, largest_difference, sparkline
from dcp.demo.jobs import DemoError, JobOutcome, Workplace, checkpoint_name
from dcp.demo.narration import Narrator
from dcp.demo.text import write_corpus
from dcp.storage.errors import CheckpointError
from dcp.storage.formats.open import has_checkpoint, open_index
from dcp.storage.stores import open_store
from dcp.verification import verify

__all__ = [
    "DEFAULT_SAVE_EVERY",
    "DESCRIPTION",
    "Story",
    "main",
    "newest_checkpoint",
    "run",
    "run_to_exit_status",
]

RESHARDED_LOSS_TOLERANCE = 0.001
"""Between runs on different numbers of ranks. The sums are the same, but added up in another order: about
1e-6 was measured at losses of 2 to 5."""

DEFAULT_SAVE_EVERY = 10
DESCRIPTION = (
    "Train a small model, kill it in a save, resume it on other numbers of ranks, and check every claim."
)

_NEEDED_BYTES = 700 << 20
"""Eighteen checkpoints of 31 MiB, and room to spare."""

_COMMIT_SECONDS = 60.0

_KILLED_BEFORE_WRITE = 2
"""A rank's file is written 8 MiB at a time and holds about 16: one write is done, one is not."""


def newest_checkpoint(root: Path) -> Path | None:
    """The newest committed checkpoint in ``root`` that verifies, as a job that starts again looks for it."""
    for folder in sorted(root.glob("step-*"), reverse=True):
        store = open_store(folder)
        if not has_checkpoint(store):
            continue
        try:
            findings = verify(folder).findings
        except CheckpointError:
            continue
        # Leftovers of a killed save beside a whole checkpoint do it no harm.
        if all(finding.kind == "stray-file" for finding in findings):
            return folder
    return None


class Story:
    """One run of the demo in a folder of its own."""

    def __init__(self, root: Path, save_every: int) -> None:
        self.checks = Checks()
        self.narrator = Narrator(self.checks)
        self.work = Workplace(root, steps=4 * save_every, save_every=save_every)
        self.killed_step = 3 * save_every
        self.last_step = 2 * save_every
        self.run_folder = self.work.checkpoints("run")

    def tell(self) -> None:
        """All chapters, in order. Raises DemoError where going on makes no sense."""
        characters = write_corpus(self.work.corpus)
        self.narrator.say(
            f"""A transformer of 2.8 million parameters learns to write Python from this package's own source
            ({characters:,} characters), with FSDP2 on CPU processes that torchrun starts. Model, AdamW
            state, step and each rank's random generator go through a dcp.CheckpointManager, which saves
            behind the training loop. It takes a minute or two. Folder: {self.work.root}"""
        )
        reference = self.train_without_interruption()
        killed = self.kill_in_a_save(reference)
        self.find_last_checkpoint()
        self.kill_after_staging(reference)
        resumed = self.resume(reference, killed)
        self.compare_curves(reference, killed, resumed)
        self.use_the_command_line()
        damaged = self.flip_a_bit()
        self.read_with_stock_torch(reference, resumed, damaged)

    # -- chapters --------------------------------------------------------------------------------------------

    def train_without_interruption(self) -> JobOutcome:
        """The run that the others are compared with."""
        self.narrator.chapter("Train without interruption, on 2 ranks")
        reference = self._train("uninterrupted", 2, checkpoints="uninterrupted")
        first, last = reference.losses[1], reference.losses[self.work.steps]
        self.narrator.check(
            f"the model learns: loss {first:.3f} at the first step, {last:.3f} at the last",
            last < 0.8 * first,
            "the loss did not fall by a fifth",
        )
        return reference

    def kill_in_a_save(self, reference: JobOutcome) -> JobOutcome:
        """The same job, which loses power while it writes."""
        step, folder = self.killed_step, self.run_folder / checkpoint_name(self.killed_step)
        self.narrator.chapter(f"The same again, but killed in the middle of the save of step {step}")
        kill_at = f"{step}:{_KILLED_BEFORE_WRITE}"
        killed = self._train("killed", 2, checkpoints="run", kill_at=kill_at)
        last = max(killed.losses, default=0)
        died = killed.exit_code == -signal.SIGKILL and last >= step
        self.narrator.check(
            f"kill -9 ended the launcher and both ranks while step {step} was being saved behind them",
            died,
            f"exit code {killed.exit_code}, last step {last}",
        )
        whole = {path.name.split(".")[0]: path for path in self._data_files("uninterrupted", step)}
        sizes = {
            path.name: (path.stat().st_size, whole[path.name.split(".")[0]].stat().st_size)
            for path in self._data_files("run", step)
        }
        self.narrator.say(f"What it left in run/{folder.name}:")
        header = ("file", "bytes", "bytes when complete")
        rows = [(name, f"{size:,}", f"{full:,}") for name, (size, full) in sizes.items()]
        self.narrator.table(header, rows, right=header[1:])
        halves = sum(0 < size < full for size, full in sizes.values())
        self.narrator.check("both ranks' files are half written", halves == 2, f"{halves} are")
        self.narrator.check(
            "the half-written folder is no checkpoint", not has_checkpoint(open_store(folder))
        )
        same = largest_difference(reference.losses, killed.losses, range(1, last + 1)) == 0
        self.narrator.check(
            f"until then it was the same run: losses of steps 1 to {last} equal bit for bit",
            same,
            "losses differ",
        )
        return killed

    def find_last_checkpoint(self) -> None:
        """What a job that starts again has to find out."""
        name, half = checkpoint_name(self.last_step), checkpoint_name(self.killed_step)
        self.narrator.chapter("Find the last checkpoint that counts")
        listing = self._dcp("ls", "run")
        self._dcp("verify", f"run/{half}", status=3, claim=f"dcp verify refuses {half}")
        found = newest_checkpoint(self.run_folder)
        states = {
            line.split()[0]: line.split()[-1] for line in listing.splitlines() if line.startswith("step-")
        }
        self.narrator.check(
            f"dcp ls tells them apart: {half} is incomplete",
            states.get(half) == "incomplete" and states.get(name) == "committed",
            repr(states),
        )
        self.narrator.check(
            f"the newest committed one is {name}, and every byte of it verifies",
            found == self.run_folder / name,
            f"found {found}",
        )

    def kill_after_staging(self, reference: JobOutcome) -> None:
        """The same again, with writers in processes of their own, which outlive the job."""
        step = self.last_step
        self.narrator.chapter(f"Kill it once more, just after the state of step {step} was copied")
        self.narrator.say(
            """This time each rank writes in a process of its own. Both ranks and their launcher are killed
            as soon as both have handed over their copies."""
        )
        job = self._train(
            "handed-over", 2, checkpoints="handed-over", writer="process", kill_at=f"{step}:staged"
        )
        folder = self.work.checkpoints("handed-over") / checkpoint_name(step)
        died = job.exit_code == -signal.SIGKILL and max(job.losses, default=0) == step
        self.narrator.check(f"kill -9 ended the job at step {step}", died, f"exit code {job.exit_code}")
        committed = _await_commit(folder)
        self.narrator.check("the writers have committed the checkpoint all the same", committed)
        self._dcp("verify", f"handed-over/{folder.name}", status=0, claim="and every byte of it verifies")
        saved = job.digests(f"saved-{step}")
        difference = compare_digests(reference.digests(f"saved-{step}"), saved)
        self.narrator.check("it is the state that the uninterrupted job saved", not difference, difference)

    def resume(self, reference: JobOutcome, killed: JobOutcome) -> dict[int, JobOutcome]:
        """From the last committed step, on as many ranks, on fewer, on more."""
        folder = self.run_folder / checkpoint_name(self.last_step)
        for where in ("on-1-rank", "on-3-ranks"):  # the manager takes the newest step of a job's own folder
            shutil.copytree(folder, self.work.checkpoints(where) / folder.name)
        self.narrator.chapter(f"Resume from step {self.last_step} on 2, on 1 and on 3 ranks")
        jobs = {}
        for ranks, where in ((2, "run"), (1, "on-1-rank"), (3, "on-3-ranks")):
            jobs[ranks] = job = self._train(f"resumed-on-{ranks}", ranks, checkpoints=where)
            self._check_loaded(ranks, killed, job)
            if ranks == 2:
                self._check_same_number(reference, job)
            else:
                self._check_other_number(ranks, reference, job)
        return jobs

    def compare_curves(
        self, reference: JobOutcome, killed: JobOutcome, resumed: dict[int, JobOutcome]
    ) -> None:
        """The losses, drawn and as numbers."""
        self.narrator.chapter("The losses of all runs")
        runs = {"uninterrupted": reference, "killed": killed}
        runs |= {f"resumed on {ranks}": job for ranks, job in resumed.items()}
        steps = range(1, self.work.steps + 1)
        low, high = min(reference.losses.values()), max(reference.losses.values())
        columns = [self.last_step + 1, self.killed_step, self.work.steps]

        def cells(job: JobOutcome) -> list[str]:
            return [f"{job.losses[step]:.7f}" if step in job.losses else "" for step in columns]

        header = ["run", f"steps 1 to {self.work.steps}", *(f"step {step}" for step in columns)]
        rows = [[name, sparkline(job.losses, steps, low, high), *cells(job)] for name, job in runs.items()]
        self.narrator.table(header, rows, right=header[2:])

    def use_the_command_line(self) -> None:
        """List and verify what is there now."""
        work, half = self.work, checkpoint_name(self.killed_step)
        self.narrator.chapter("List and verify the checkpoints")
        self._dcp("ls", "run")
        last = checkpoint_name(work.steps)
        folders = [
            f"run/{checkpoint_name(self.last_step)}",
            f"run/{last}",
            f"on-1-rank/{last}",
            f"on-3-ranks/{last}",
        ]
        self._dcp("verify", *folders, status=0, claim="every byte of four checkpoints verifies")
        self.narrator.say(
            f"""The resumed job saved step {self.killed_step} into the folder where the killed one left its
            halves. It is a whole checkpoint now, and the save has cleared the halves away:"""
        )
        self._dcp("verify", f"run/{half}")
        committed = open_index(open_store(self.run_folder / half))
        strays = [p.name for p in self._data_files("run", self.killed_step) if p.name not in committed.files]
        findings = verify(self.run_folder / half).findings
        self.narrator.check(
            f"{half} is a checkpoint, and nothing of the killed save is left in it",
            not findings and not strays,
            f"{findings}, {strays}",
        )

    def flip_a_bit(self) -> Path:
        """Damage a copy where it hurts most: in the middle of a tensor, sizes and headers intact."""
        self.narrator.chapter("Flip one bit of a copy")
        source = self.run_folder / checkpoint_name(self.work.steps)
        damaged = self.work.checkpoints("damaged") / source.name
        shutil.copytree(source, damaged)
        name = _flip_bit_of_largest_chunk(damaged)
        output = self._dcp("verify", f"damaged/{damaged.name}", status=1, claim="dcp verify finds it")
        self.narrator.check(f"and names the tensor: {name}", name in output)
        return damaged

    def read_with_stock_torch(
        self, reference: JobOutcome, resumed: dict[int, JobOutcome], damaged: Path
    ) -> None:
        """One process, torch's own loader, no code of ours but the comparison."""
        self.narrator.chapter("Load with stock torch.distributed.checkpoint, in a single process")
        last = self.work.steps
        places = {2: "run", 1: "on-1-rank", 3: "on-3-ranks"}
        folders = [str(self.work.checkpoints(where) / checkpoint_name(last)) for where in places.values()]
        folders.append(str(self.work.checkpoints("handed-over") / checkpoint_name(self.last_step)))
        done = self.work.command("dcp.demo.stock", str(damaged), *folders)
        if done.returncode != 0:
            raise DemoError(f"the process that loads with stock torch failed:\n{done.stderr[-4000:]}")
        result = json.loads(done.stdout)
        *of_jobs, handed_over = result["stock"]
        for ranks, digests in zip(places, of_jobs, strict=True):
            difference = compare_digests(resumed[ranks].digests(f"saved-{last}"), digests)
            who = f"{ranks} ranks" if ranks > 1 else "1 rank"
            self.narrator.check(
                f"saved by {who}, loaded by stock torch: all {len(digests)} entries equal bit for bit",
                not difference,
                difference,
            )
        difference = compare_digests(reference.digests(f"saved-{self.last_step}"), handed_over)
        self.narrator.check(
            "committed after its job had died, loaded by stock torch: every entry is that of the "
            "uninterrupted job",
            not difference,
            difference,
        )
        self._show_damaged(result)

    # -- what chapters share ---------------------------------------------------------------------------------

    def _show_damaged(self, result: dict[str, Any]) -> None:
        by_stock, by_ours = result["damaged_by_stock"], result["damaged_by_ours"]
        if isinstance(by_stock, dict):
            wrong = compare_digests(result["stock"][0], by_stock)
            by_stock = f"loads it without a word, and {wrong or 'nothing differs'}"
        self.narrator.say(f"The copy with the flipped bit: stock torch {by_stock}. dcp.load says:")
        self.narrator.output(by_ours)
        self.narrator.check(
            "dcp.load refuses the copy", by_ours.startswith("CorruptCheckpointError"), by_ours
        )

    def _check_loaded(self, ranks: int, killed: JobOutcome, job: JobOutcome) -> None:
        """What the ranks hold after the load is what the killed job's ranks held when they saved."""
        step = self.last_step
        saved, loaded = killed.digests(f"saved-{step}"), job.digests(f"loaded-{step}")
        # a rank's generator has a meaning only on as many ranks
        difference = compare_digests(saved, loaded, without="" if ranks == 2 else "rng.")
        what = "model, AdamW state, step" + (" and both generators" if ranks == 2 else "")
        self.narrator.check(f"on {ranks}: {what} loaded bit for bit as saved", not difference, difference)
        first = min(job.losses, default=0)
        self.narrator.check(f"on {ranks}: went on with step {first}", first == step + 1)

    def _check_same_number(self, reference: JobOutcome, job: JobOutcome) -> None:
        """On as many ranks as before nothing shows that the job ever died."""
        steps = range(self.last_step + 1, self.work.steps + 1)
        same = largest_difference(reference.losses, job.losses, steps) == 0
        self.narrator.check("on 2: losses bit for bit as without interruption", same, "they differ")
        same = largest_difference(reference.looks, job.looks, steps) == 0
        self.narrator.check("on 2: the random generators go on as without interruption", same, "they differ")
        name = f"saved-{self.work.steps}"
        difference = compare_digests(reference.digests(name), job.digests(name))
        claim = f"on 2: the state after step {self.work.steps} is bit for bit that of the uninterrupted run"
        self.narrator.check(claim, not difference, difference)

    def _check_other_number(self, ranks: int, reference: JobOutcome, job: JobOutcome) -> None:
        """The sums of more or fewer parts differ in their last bits, and by no more."""
        steps = range(self.last_step + 1, self.work.steps + 1)
        apart = largest_difference(reference.losses, job.losses, steps)
        self.narrator.check(
            f"on {ranks}: losses as without interruption, within {RESHARDED_LOSS_TOLERANCE:g} (largest "
            f"difference {apart:.1e}: other ranks add up in another order)",
            apart <= RESHARDED_LOSS_TOLERANCE,
        )

    def _train(self, name: str, ranks: int, **where: Any) -> JobOutcome:
        steps = self.work.steps
        on = "1 process" if ranks == 1 else f"{ranks} processes"
        with self.narrator.training(f"torchrun starts {on} ...", steps) as on_step:
            job = self.work.train(name, ranks, on_step=on_step, **where)
        done = f"steps {min(job.losses, default=0)} to {max(job.losses, default=0)} in {job.seconds:.0f} s"
        self.narrator.say(f"{name}: {done}")
        return job

    def _data_files(self, job: str, step: int) -> list[Path]:
        return sorted((self.work.checkpoints(job) / checkpoint_name(step)).glob("*.distcp"))

    def _dcp(self, *arguments: str, status: int | None = None, claim: str = "") -> str:
        """Run a dcp command, show it; ``status`` is the exit status that ``claim`` needs."""
        done = self.work.command("dcp", *arguments)
        output = done.stdout + done.stderr
        self.narrator.command("dcp " + " ".join(arguments), output, done.returncode)
        if status is not None:
            self.narrator.check(claim, done.returncode == status, f"exit status {done.returncode}")
        return output


def _await_commit(folder: Path) -> bool:
    """Whether a checkpoint is committed in ``folder``, or soon will be: its writers are on their own now."""
    give_up = time.monotonic() + _COMMIT_SECONDS
    while time.monotonic() < give_up:
        if has_checkpoint(open_store(folder)):
            return True
        time.sleep(0.05)
    return False


def _flip_bit_of_largest_chunk(folder: Path) -> str:
    """Flip one bit of the checkpoint in ``folder``, in the middle of its longest payload; whose it is."""
    index = open_index(open_store(folder))
    chunk = int(index.payload_lengths.argmax())
    position = int(index.payload_offsets[chunk] + index.payload_lengths[chunk] // 2)
    with (folder / index.files[int(index.chunk_files[chunk])]).open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))
    return index.fqns[int(index.chunk_start.searchsorted(chunk, side="right")) - 1]


def _sum_up(checks: Checks, narrator: Narrator, seconds: float, kept: str) -> int:
    narrator.chapter("What this showed")
    if checks.failed:
        for claim, reason in checks.failed:
            narrator.say(f"FAILED: {claim}{': ' if reason else ''}{reason}")
        narrator.say(f"{len(checks.failed)} of {len(checks.results)} checks failed, after {seconds:.0f} s.")
        return 1
    narrator.say(
        """A job killed in the middle of a save loses the steps since its last checkpoint, and nothing else:
        the half-written save is not taken for one, and on the same number of ranks training goes on as if
        nothing had happened, bit for bit. The same checkpoint loads on fewer and on more ranks, every bit of
        it. With a writer process even a job that is killed right after a step was copied gets that step
        committed. Stock torch reads what dcp wrote. A flipped bit is found, and the tensor named."""
    )
    narrator.say(f"All {len(checks.results)} checks passed, in {seconds:.0f} s. {kept}")
    return 0


def run(root: Path | None = None, *, save_every: int = DEFAULT_SAVE_EVERY) -> int:
    """Run the demo in ``root`` (made if need be, must be empty) or in a folder that is removed at the end.

    Returns the exit status: 0 if every check passed, 1 if not or if a job failed, 2 for wrong use.
    """
    if find_spec("torch") is None:
        print("dcp: the demo trains a model and needs torch: pip install 'dcphub[torch]'", file=sys.stderr)
        return 2
    if root is not None:
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            print(f"dcp: {root} is not empty; the demo wants a folder of its own", file=sys.stderr)
            return 2
        last = root / "checkpoints" / "run" / checkpoint_name(4 * save_every)
        kept = f"Everything is kept; look at it, for instance with: dcp show {last}"
        return _tell(root.resolve(), save_every, kept)
    with tempfile.TemporaryDirectory(prefix="dcp-demo-") as folder:
        return _tell(Path(folder).resolve(), save_every, "The folder is removed; --root DIR keeps it.")


def _tell(root: Path, save_every: int, kept: str) -> int:
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < _NEEDED_BYTES:
        print(
            f"dcp: {root} has {free_bytes >> 20} MiB free, the demo needs {_NEEDED_BYTES >> 20}: "
            "give it a folder with --root",
            file=sys.stderr,
        )
        return 2
    begun = time.monotonic()
    story = Story(root, save_every)
    try:
        story.tell()
    except DemoError as error:
        story.narrator.check("the demo ran to its end", False, str(error))
    return _sum_up(story.checks, story.narrator, time.monotonic() - begun, kept)


def run_to_exit_status(root: Path | None, save_every: int) -> int:
    """`run` for a command line: also what ends it from outside becomes an exit status, after cleaning up."""
    # As an exception, so that on the way out the training job is ended and the folder removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return run(root, save_every=save_every)
    except KeyboardInterrupt:
        print("\ndcp: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def main() -> int:
    """The command line of ``python -m dcp.demo``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dcp.demo", description=DESCRIPTION)
    parser.add_argument("--root", type=Path, help="keep everything in this folder, which must be empty")
    parser.add_argument(
        "--save-every",
        type=int,
        default=DEFAULT_SAVE_EVERY,
        help="steps between saves; a run has four saves (default: %(default)s)",
    )
    options = parser.parse_args()
    if options.save_every < 1:
        parser.error("--save-every must be 1 or more")
    return run_to_exit_status(options.root, options.save_every)

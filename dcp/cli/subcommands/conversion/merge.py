"""``dcp merge``: the weighted sum of checkpoints, averages over a run, adapters into their base."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp.cli.common import Debug, Json, Options, errors_as_lines, print_json, printable, storage_options
from dcp.cli.subcommands.conversion.options import (
    Chunks,
    ChunksOption,
    DropObjects,
    Dtype,
    Exclude,
    Executor,
    Files,
    Hf,
    HfAlso,
    NoVerify,
    Only,
    Overwrite,
    Rename,
    ShardSize,
    TargetOptions,
    Workers,
    options_of,
    print_report,
    target_format,
    with_progress,
)
from dcp.cli.subcommands.conversion.weight_maps import (
    Below,
    Config,
    Inverse,
    Sizes,
    map_of,
    refuse_without_map,
)
from dcp.cli.tables import counted

if TYPE_CHECKING:
    from dcp.planners.weight_maps.weight_map import WeightMap

__all__ = ["command"]

_NO_MAP = "-"


class Accumulate(StrEnum):
    """The type in which sums are made."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


def _numbers(text: str | None, what: str) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{what}: {text!r} are no numbers with commas between them") from None


def command(
    sources: Annotated[
        list[str] | None, typer.Argument(help="Checkpoints of any formats: paths or URLs.")
    ] = None,
    target: Annotated[
        str, typer.Option("--output", "-o", help="What to write: a folder or a file, path or URL.")
    ] = ...,  # type: ignore[assignment]
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            parser=target_format,
            help="The format to write; by default that of the output's suffix, or of the first source.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="One for each source, as they are; by default equal ones."),
    ] = None,
    formula: Annotated[
        str | None, typer.Option(metavar="SUM", help="Instead: 'A + 0.4*(B - C)', A is the first source.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Instead of sources: a run, whose steps are averaged."),
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="How many of its steps, the newest.")] = None,
    decay: Annotated[
        float | None,
        typer.Option(help="An exponential moving average: each older step weighs as much less."),
    ] = None,
    folders: Annotated[
        str, typer.Option(metavar="FORMAT", help="How the run names the folders of its steps.")
    ] = "step-{step:08d}",
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="FOLDER", help="A low-rank adapter of peft, to be added.")
    ] = None,
    adapter_weights: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="One for each adapter; by default 1.")
    ] = None,
    accumulate: Annotated[Accumulate, typer.Option(help="The type in which is added.")] = Accumulate.FLOAT32,
    only: Only = None,
    exclude: Exclude = None,
    rename: Rename = None,
    dtype: Dtype = None,
    weight_maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="MAP",
            help="A weight map for all sources: a name of `dcp map ls`, or a file. Given several times, one "
            "for each source; - for none.",
        ),
    ] = None,
    inverse: Inverse = False,
    below: Below = None,
    config: Config = None,
    sizes: Sizes = None,
    files: Files = 1,
    chunks: ChunksOption = Chunks.KEEP,
    shard_size: ShardSize = None,
    hf: Hf = None,
    hf_also: HfAlso = None,
    drop_objects: DropObjects = False,
    overwrite: Overwrite = False,
    executor: Executor = "processes",
    workers: Workers = None,
    no_verify: NoVerify = False,
    options: Options = None,
    target_options: TargetOptions = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Add up checkpoints of any formats and shardings, each times its weight, in constant memory.

    A merge that was killed goes on where it was when the same command is given again.
    """
    chosen: dict[str, Any] = options_of(locals()) | {
        "weights": _numbers(weights, "--weights"),
        "formula": formula,
        "run": run,
        "last": last,
        "decay": decay,
        "name": folders,
        "adapters": adapter or (),
        "adapter_weights": _numbers(adapter_weights, "--adapter-weights"),
        "accumulate": accumulate.value,
    }
    with errors_as_lines(debug=debug):
        chosen["map"] = _maps(weight_maps or (), config, sizes, inverse=inverse, below=below)
        places = [*(sources or ()), *(adapter or ()), *([run] if run else ())]
        remote = next((place for place in places if storage_options(place, options)), None)
        chosen["storage_options"] = storage_options(remote, options) if remote else None
        chosen["target_options"] = storage_options(target, target_options)
        with with_progress(target) as chosen["progress"]:
            from dcp.conversion.merge import merge  # here, because a usage message must not wait for it

            report = merge(sources or (), target, **chosen)
    if json:
        print_json(report)
        return
    for name, weight in report.weights:
        print(printable(f"{weight:g} * {name}"))
    print_report(report)
    if report.unmerged:
        print(f"{counted(len(report.unmerged), 'tensor')} of whole numbers are the first source's")


def _maps(
    names: Sequence[str], config: str | None, sizes: list[str] | None, *, inverse: bool, below: str | None
) -> WeightMap | list[WeightMap | None] | None:
    """As `dcp.merge` takes them; a usage error for options about a map where none is."""
    if not names:
        refuse_without_map(config, sizes, inverse=inverse, below=below)
        return None
    maps = [
        None if one == _NO_MAP else map_of(one, config, sizes, inverse=inverse, below=below) for one in names
    ]
    return maps[0] if len(maps) == 1 else maps

"""Subcommands that make checkpoints of checkpoints: ``convert`` and ``merge``, and ``map``, which shows
maps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from dcp.cli.common import (
    EXIT_FINDINGS,
    Debug,
    Exclude,
    Json,
    Only,
    Options,
    Source,
    describe_bytes,
    describe_shape,
    errors_as_lines,
    print_json,
    printable,
    storage_options,
    unwinding_on_sigterm,
)
from dcp.cli.tables import Top, counted, print_rest, print_table, progress_bar, top_of
from dcp.storage.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from dcp.conversion.driver import ConversionReport
    from dcp.planners.weight_maps.mapped_index import Misfit
    from dcp.planners.weight_maps.pieces import MappedTensor
    from dcp.planners.weight_maps.weight_map import WeightMap
    from dcp.progress import Progress

__all__ = ["ConvertCommand", "convert_command", "map_app", "merge_command"]


_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_MAX_LISTED = 5


def target_formats() -> list[str]:
    """Return the formats that can be written. BadParameter where a package that has one cannot be
    imported."""
    from dcp.storage.formats.registry import target_names  # here, as it reads what is installed

    try:
        return target_names()
    except CheckpointError as error:
        raise typer.BadParameter(str(error)) from error


def target_format(name: str) -> str:
    """Return one of the formats that can be written; for ours nothing is read of what is installed."""
    from dcp.storage.formats.registry import target_named

    try:
        target_named(name)
    except OptionError:
        known = ", ".join(map(repr, target_formats()))
        raise typer.BadParameter(f"{name!r} is not one of {known}.") from None
    except CheckpointError as error:
        raise typer.BadParameter(str(error)) from error
    return name


class Chunks(StrEnum):
    """Ways to cut the tensors of a dcp target."""

    KEEP = "keep"
    SPLIT = "split"


def _size(text: str | None) -> int | None:
    """Return bytes of ``5GB``, ``4GiB`` or a plain number."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write 5GB, 500MiB or a number of bytes")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _pairs(values: list[str] | None, separator: str, what: str) -> dict[str, str]:
    """Return ``left<separator>right`` of each value."""
    found = {}
    for value in values or ():
        left, separated, right = value.partition(separator)
        if not separated or not left:
            raise typer.BadParameter(f"{value!r} is not {what}")
        found[left] = right
    return found


def _dtypes(values: list[str] | None) -> str | dict[str, str] | None:
    """Return one dtype for all, or dtypes by glob."""
    if not values:
        return None
    if len(values) == 1 and "=" not in values[0]:
        return values[0]
    return _pairs(values, "=", "GLOB=DTYPE; one DTYPE alone is for all tensors")


Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename", metavar="REGEX=>NEW", help=r"Rename, such as '^module\.=>'; one after the other."
    ),
]
Dtype = Annotated[
    list[str] | None,
    typer.Option("--dtype", metavar="[GLOB=]DTYPE", help="Cast floating-point tensors, such as bfloat16."),
]
Files = Annotated[int, typer.Option(min=1, help="Data files of a dcp target.")]
ChunksOption = Annotated[
    Chunks, typer.Option(help="keep: chunks as in the source; split: one a file, for dcp.")
]
ShardSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Largest file of a safetensors folder, such as 5GB.")
]
Hf = Annotated[
    str | None,
    typer.Option(
        "--hf", metavar="MODEL", help="Folder or hub name, whose config and tokenizer go with the weights."
    ),
]
HfAlso = Annotated[
    list[str] | None, typer.Option("--hf-also", metavar="GLOB", help="Further files of it, such as '*.py'.")
]
DropObjects = Annotated[
    bool, typer.Option("--drop-objects", help="Leave out values that the format cannot hold.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
Executor = Annotated[str, typer.Option(metavar="WHERE", help="processes, inline, or dask://HOST:PORT.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes at a time.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Do not compare the source's checksums.")]
TargetOptions = Annotated[
    str | None,
    typer.Option("--target-options", metavar="JSON", help="As --storage-options, for the target's URL."),
]


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `dcp.convert` that those of the command line mean, which are in ``given`` by
    name."""
    names = ("to", "files", "hf", "drop_objects", "overwrite", "executor", "workers")
    return {name: given[name] for name in names} | {
        "only": given["only"] or None,
        "exclude": given["exclude"] or None,
        "hf_also": tuple(given["hf_also"] or ()),
        "rename": _pairs(given["rename"], "=>", "REGEX=>NEW") or None,
        "dtype": _dtypes(given["dtype"]),
        "shard_bytes": _size(given["shard_size"]),
        "chunks": given["chunks"].value,
        "verify": "none" if given["no_verify"] else "blocks",
    }


@contextmanager
def with_progress(target: str) -> Iterator[Callable[[Progress], None]]:
    """Provide a callback that moves a progress bar, where there is one."""
    with unwinding_on_sigterm(), progress_bar(target) as show:

        def progress(done: Progress) -> None:
            if show is not None:
                show(done.bytes_done, done.bytes_total)

        yield progress


def print_report(report: ConversionReport) -> None:
    """Print the result in a few lines."""
    seconds = report.seconds.get("total", 0.0)
    rate = f", {describe_bytes(int(report.bytes_written / seconds))}/s" if seconds > 0 else ""
    resumed = (
        f", {report.tasks_resumed} of {report.tasks} parts had been done before"
        if report.tasks_resumed
        else ""
    )
    tensors, files = counted(report.tensor_count, "tensor"), counted(len(report.files), "file")
    print(
        printable(
            f"{report.target}: {tensors} in {files}, "
            f"{describe_bytes(report.bytes_written)} in {seconds:.1f} s{rate}{resumed}"
        )
    )
    if report.blocks_unverified:
        print(f"{report.blocks_unverified} of the source's blocks have no checksum to compare with")
    if report.dropped_objects:
        names = ", ".join(report.dropped_objects[:_MAX_LISTED])
        more = len(report.dropped_objects) - _MAX_LISTED
        print(printable(f"left out: {names}{f' and {more} more' if more > 0 else ''}"))


map_app = typer.Typer(
    help="Maps from one model definition's weights to another's.", no_args_is_help=True, rich_markup_mode=None
)

Inverse = Annotated[bool, typer.Option("--inverse", help="The map's other way.")]
Below = Annotated[
    str | None,
    typer.Option("--below", metavar="KEY", help="What the source has the model below, such as model."),
]
Config = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="The model's config.json, if it is not in the source."),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=NUMBER", help="A size, such as num_attention_heads=32."),
]

Into = Annotated[
    str | None,
    typer.Option(
        "--into", metavar="CHECKPOINT", help="One of the other definition: what of it would be missing?"
    ),
]

_MapName = Annotated[
    str, typer.Argument(metavar="MAP", help="A name of `dcp map ls`, or a TOML or JSON file.")
]


def map_of(
    name: str, config: str | None, sizes: list[str] | None, *, inverse: bool, below: str | None
) -> WeightMap:
    """Return the map that these options mean; ``below`` as for `dcp.weight_map`."""
    from dcp.planners.weight_maps.weight_map import weight_map

    numbers: dict[str, int] = {}
    for given in sizes or ():
        left, _, right = given.partition("=")
        if not left or not right.isdecimal() or len(right) > 20:
            raise typer.BadParameter(f"{given!r} is not NAME=NUMBER")
        numbers[left] = int(right)
    found = weight_map(name, config).with_numbers(numbers)
    return weight_map(found, inverse=inverse, below=below)


def refuse_without_map(
    config: str | None, sizes: list[str] | None, *, inverse: bool, below: str | None
) -> None:
    """Raise a usage error if any of these is given, where no map is."""
    if inverse or below or config or sizes:
        raise typer.BadParameter("--inverse, --below, --config and --set are about --map, which is missing")


@map_app.command("ls")
def list_maps(json: Json = False) -> None:
    """List the maps that come with the package."""
    from dcp.planners.weight_maps.weight_map import WeightMap, ready_maps

    found = {name: WeightMap.of(name).description for name in ready_maps()}
    if json:
        print_json(found)
    else:
        print_table(("map", "what"), list(found.items()))


@map_app.command("check")
def check(
    weights: _MapName,
    uri: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint of any format: path or URL.")],
    inverse: Inverse = False,
    below: Below = None,
    config: Config = None,
    sizes: Sizes = None,
    only: Only = None,
    exclude: Exclude = None,
    into: Into = None,
    top: Top = None,
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a map would make of a checkpoint; nothing is read of its tensors. Exits with 1 if it does not
    fit, or would not load."""
    with errors_as_lines(debug=debug):
        from dcp.planners.weight_maps.mapped_index import map_index, misfits
        from dcp.storage.errors import PlanError
        from dcp.storage.formats.opening import complete_index, open_source
        from dcp.storage.stores.opening import OpenWith

        found = map_of(weights, config, sizes, inverse=inverse, below=below)
        try:
            source = open_source(uri, open_store=OpenWith(storage_options(uri, options)))
            index = complete_index(source.store, source.index)
            mapped = map_index(index, source.store, found, only or None, exclude or None)
        except PlanError as error:
            print(printable(str(error)))
            raise typer.Exit(EXIT_FINDINGS) from None
        if into is not None:
            there = open_source(into, open_store=OpenWith(storage_options(into, options)))
            _print_misfits([*misfits(mapped, there.index)], len(there.index.fqns), top, json=json)
            return
    tensors = mapped.tensors
    if json:
        print_json([_map_row(tensor) for tensor in tensors])
        return
    sources = {name for tensor in tensors for name in tensor.sources}
    print(f"{counted(len(sources), 'tensor')} become {len(tensors)}")
    rows: list[Sequence[str]] = [*map(_map_line, tensors)]
    print_table(("tensor", "shape", "made of"), top_of(rows, top))
    print_rest(rows, top, "tensor")


def _print_misfits(found: Sequence[Misfit], wanted: int, top: int | None, *, json: bool) -> None:
    """Print what does not fit, and exit with 1 where a load would fail."""
    lacking = sum(one.kind != "unexpected" for one in found)
    if json:
        print_json([one._asdict() for one in found])
    else:
        print(f"{wanted - lacking} of {counted(wanted, 'tensor')} fit")
        rows: list[Sequence[str]] = [*found]
        if rows:
            print_table(("what", "tensor", "wanted", "found"), top_of(rows, top))
        print_rest(rows, top, "tensor")
    if lacking:
        raise typer.Exit(EXIT_FINDINGS)


def _map_row(tensor: MappedTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": tensor.shape,
        "sources": tensor.sources,
        "padding": tensor.padding,
        "is_renamed": tensor.is_renamed,
    }


def _map_line(tensor: MappedTensor) -> tuple[str, str, str]:
    zeros = f" and {tensor.padding} zeros" if tensor.padding else ""
    moved = "" if tensor.is_renamed else " (rearranged)"
    shape = describe_shape(tensor.shape)
    return tensor.name, shape, f"{', '.join(tensor.sources)}{zeros}{moved}"


class ConvertCommand(TyperCommand):
    """Says in its help which formats can be written; what is installed is looked at only then."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as any command does; where no format was given, the error says which there are."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is not None and error.param.name == "to" and not error.message:
                error.message = f"Choose from: {', '.join(target_formats())}"
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help as of any command."""
        with suppress(typer.BadParameter):  # help is there for whom a broken package is in the way, too
            known = "|".join(target_formats())
            for option in self.params:
                if option.name == "to":
                    option.metavar = f"[{known}]"
        super().format_help(ctx, formatter)


_Target = Annotated[str, typer.Argument(help="What to write: a folder or a file, path or URL.")]
_To = Annotated[
    str, typer.Option("--to", metavar="FORMAT", parser=target_format, help="The format to write.")
]
_Map = Annotated[
    str | None,
    typer.Option("--map", metavar="MAP", help="A weight map: a name of `dcp map ls`, or a file."),
]


def convert_command(
    source: Source,
    target: _Target,
    to: _To,
    only: Only = None,
    exclude: Exclude = None,
    rename: Rename = None,
    dtype: Dtype = None,
    weight_map: _Map = None,
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
    """Convert between dcp, torch.save and safetensors, in constant memory, without running pickles.

    A conversion that was killed is resumed when the same command is given again. Of one that was
    finished the target is compared, and nothing is written.
    """
    chosen = options_of(locals())
    with errors_as_lines(debug=debug):
        if weight_map is not None:
            chosen["map"] = map_of(weight_map, config, sizes, inverse=inverse, below=below)
        else:
            refuse_without_map(config, sizes, inverse=inverse, below=below)
        chosen["storage_options"] = storage_options(source, options)
        chosen["target_options"] = storage_options(target, target_options)
        with with_progress(target) as chosen["progress"]:
            from dcp.conversion.run import convert  # here, because a usage message must not wait for numpy

            report = convert(source, target, **chosen)
    if json:
        print_json(report)
    else:
        print_report(report)


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


def merge_command(
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

    A merge that was killed is resumed when the same command is given again.
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
    """Make the maps as `dcp.merge` takes them; a usage error for options about a map where none is."""
    if not names:
        refuse_without_map(config, sizes, inverse=inverse, below=below)
        return None
    maps = [
        None if one == _NO_MAP else map_of(one, config, sizes, inverse=inverse, below=below) for one in names
    ]
    return maps[0] if len(maps) == 1 else maps

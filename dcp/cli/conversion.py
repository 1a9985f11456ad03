"""Commands that write checkpoints: ``convert``, ``merge``, and ``map`` to show weight maps."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import typer
from typer import Argument, Option
from typer.core import TyperCommand

from dcp.cli import printing
from dcp.cli.common import (
    EXCLUDE,
    EXIT_FINDINGS,
    FOLDERS,
    ONLY,
    SOURCE,
    STORAGE,
    TOP,
    Answer,
    Strings,
    storage_options,
    unwinding_on_sigterm,
)
from dcp.cli.printing import counted
from dcp.storage.errors import CheckpointError, OptionError, PlanError

if TYPE_CHECKING:
    from dcp.conversion.driver import ConversionReport
    from dcp.planners.weight_maps.pieces import MappedTensor
    from dcp.planners.weight_maps.weight_map import WeightMap

_SIZE: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_MAX_LISTED: Final = 5
_NO_MAP: Final = "-"


Chunks = StrEnum("Chunks", ["KEEP", "SPLIT"])
Accumulate = StrEnum("Accumulate", ["FLOAT32", "FLOAT64"])

# -- options that mean more than a value ---------------------------------------------------------------------


def _target_formats() -> list[str]:
    """Return the writable formats. BadParameter if the package of a format cannot be imported."""
    from dcp.storage.formats.registry import (
        target_names,
    )  # imported here, because the import reads installed packages

    try:
        return target_names()
    except CheckpointError as error:
        raise typer.BadParameter(str(error)) from error


def _target_format(name: str) -> str:
    """Validate a writable format; installed packages are searched only for formats that are not built in."""
    from dcp.storage.formats.registry import target_named

    try:
        target_named(name)
    except OptionError:
        known = ", ".join(map(repr, _target_formats()))
        raise typer.BadParameter(f"{name!r} is not one of {known}.") from None
    except CheckpointError as error:
        raise typer.BadParameter(str(error)) from error
    return name


def _size(text: str | None) -> int | None:
    """Return bytes of ``5GB``, ``4GiB`` or a plain number."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size: write 5GB, 500MiB or a number of bytes")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _pairs(values: Strings, separator: str, what: str) -> dict[str, str]:
    """Split each value into ``left`` and ``right`` at the separator."""
    found = {}
    for value in values or ():
        left, separated, right = value.partition(separator)
        if not separated or not left:
            raise typer.BadParameter(f"{value!r} is not of the form {what}")
        found[left] = right
    return found


def _dtypes(values: Strings) -> str | dict[str, str] | None:
    """Return one dtype for all, or dtypes by glob."""
    if not values:
        return None
    if len(values) == 1 and "=" not in values[0]:
        return values[0]
    return _pairs(values, "=", "GLOB=DTYPE; a single DTYPE applies to all tensors")


def _numbers(text: str | None, what: str) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{what}: {text!r} is not a list of numbers such as 0.5,0.5") from None


def _map_options(
    inverse: bool = Option(False, "--inverse", help="Apply the map backwards."),
    below: str | None = Option(None, metavar="KEY", help="Key of the model in the source, as model."),
    config: str | None = Option(
        None, metavar="FILE", help="The model's config.json; default: in the source."
    ),
    sizes: Strings = Option(None, "--set", metavar="NAME=NUMBER", help="A size, as num_attention_heads=32."),
) -> dict[str, Any]:
    """Return the options of ``--map``, with sizes as integers."""
    given: dict[str, Any] = dict(locals())
    numbers = _pairs(sizes, "=", "NAME=NUMBER")
    if not all(number.isdecimal() and len(number) <= 20 for number in numbers.values()):
        raise typer.BadParameter(f"--set: {sizes!r} is not of the form NAME=NUMBER")
    return given | {"sizes": {name: int(number) for name, number in numbers.items()}}


def _map_of(name: str, how: dict[str, Any]) -> WeightMap:
    """Return the map of a name or file."""
    from dcp.planners.weight_maps.weight_map import weight_map

    found = weight_map(name, how["config"]).with_numbers(how["sizes"])
    return weight_map(found, inverse=how["inverse"], below=how["below"])


def _maps_of(names: list[str], how: dict[str, Any]) -> WeightMap | list[WeightMap | None] | None:
    """Return maps as `dcp.merge` takes them. A usage error for map options without a map."""
    if not names and any(how.values()):
        raise typer.BadParameter("--inverse, --below, --config and --set require --map")
    maps = [None if name == _NO_MAP else _map_of(name, how) for name in names]
    return maps[0] if len(maps) == 1 else maps or None


def _conversion_options(
    only: Strings = ONLY,
    exclude: Strings = EXCLUDE,
    rename: Strings = Option(None, metavar="REGEX=>NEW", help=r"Rename, as '^module\.=>'; in this order."),
    dtype: Strings = Option(None, metavar="[GLOB=]DTYPE", help="Cast floating-point tensors, as bfloat16."),
    files: int = Option(1, min=1, help="Data files of a dcp target."),
    chunks: Chunks = Option(Chunks.KEEP, help="dcp: keep the source's chunks, or split over all files."),
    shard_size: str | None = Option(None, metavar="SIZE", help="Largest file of a folder, such as 5GB."),
    hf: str | None = Option(None, metavar="MODEL", help="Template folder or hub name: config, tokenizer."),
    hf_also: Strings = Option(None, metavar="GLOB", help="Further template files, such as '*.py'."),
    drop_objects: bool = Option(
        False, "--drop-objects", help="Leave out values that the format cannot hold."
    ),
    overwrite: bool = Option(False, "--overwrite", help="Replace an existing target."),
    executor: str = Option("processes", metavar="WHERE", help="processes, inline, or dask://HOST:PORT."),
    workers: int | None = Option(None, min=1, help="Processes at a time."),
    no_verify: bool = Option(False, "--no-verify", help="Do not compare the source's checksums."),
) -> dict[str, Any]:
    """Return the options common to `dcp.convert` and `dcp.merge`."""
    given: dict[str, Any] = dict(locals())
    return given | {
        "rename": _pairs(rename, "=>", "REGEX=>NEW") or None,
        "dtype": _dtypes(dtype),
        "chunks": chunks.value,
        "shard_bytes": _size(given.pop("shard_size")),
        "hf_also": tuple(hf_also or ()),
        "verify": "none" if given.pop("no_verify") else "blocks",
    }


def _sum_options(
    weights: str | None = Option(None, metavar="N,N,...", help="One for each source; default: equal."),
    formula: str | None = Option(None, metavar="SUM", help="'A + 0.4*(B - C)'; A is the first source."),
    run: str | None = Option(None, metavar="FOLDER", help="Average the steps of this run."),
    last: int | None = Option(None, min=1, help="Number of newest steps."),
    decay: float | None = Option(None, help="Decay of an exponential moving average."),
    folders: str = FOLDERS,
    adapter: Strings = Option(None, metavar="FOLDER", help="Add this LoRA adapter of PEFT."),
    adapter_weights: str | None = Option(None, metavar="N,N,...", help="One for each adapter; default 1."),
    accumulate: Accumulate = Option(Accumulate.FLOAT32, help="Accumulation type."),
) -> dict[str, Any]:
    """Return the options of `dcp.merge`."""
    given: dict[str, Any] = dict(locals())
    return given | {
        "weights": _numbers(weights, "--weights"),
        "name": given.pop("folders"),
        "adapters": given.pop("adapter") or (),
        "adapter_weights": _numbers(adapter_weights, "--adapter-weights"),
        "accumulate": accumulate.value,
    }


_MAP: Any = _map_options
_CONVERSION: Any = _conversion_options
_SUM: Any = _sum_options
_TARGET_STORAGE: Final = Option(
    None, "--target-options", metavar="JSON", help="As --storage-options, for the target's URL."
)

# -- convert and merge ---------------------------------------------------------------------------------------


class ConvertCommand(TyperCommand):
    """Lists writable formats in its help, including installed packages."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; a missing format is an error that lists all formats."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is not None and error.param.name == "to" and not error.message:
                error.message = f"Choose from: {', '.join(_target_formats())}"
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help as of any command."""
        with suppress(typer.BadParameter):  # help must work even if the package of a format is broken
            known = "|".join(_target_formats())
            for option in self.params:
                if option.name == "to":
                    option.metavar = f"[{known}]"
        super().format_help(ctx, formatter)


def convert(
    source: str = SOURCE,
    target: str = Argument(..., help="Folder or file to write: path or URL."),
    to: str = Option(..., metavar="FORMAT", parser=_target_format, help="The format to write."),
    weight_map: str | None = Option(None, "--map", metavar="MAP", help="A name of `dcp map ls`, or a file."),
    how: dict[str, Any] = _MAP,
    chosen: dict[str, Any] = _CONVERSION,
    options: str | None = STORAGE,
    target_options: str | None = _TARGET_STORAGE,
) -> Answer:
    """Convert between dcp, torch.save and safetensors, in constant memory, without running pickles.

    Repeat the command to resume a killed conversion. A finished target is compared, and nothing is written.
    """
    chosen["map"] = _maps_of([] if weight_map is None else [weight_map], how)
    chosen["storage_options"] = storage_options(source, options)
    chosen["target_options"] = storage_options(target, target_options)
    from dcp.conversion.run import convert

    with unwinding_on_sigterm():
        report = convert(source, target, to=to, progress=True, **chosen)
    return Answer(report, lambda: _print_report(report))


def merge(
    sources: Strings = Argument(None, help="Checkpoints of any formats: paths or URLs."),
    target: str = Option(..., "--output", "-o", help="Folder or file to write: path or URL."),
    to: str | None = Option(
        None,
        metavar="FORMAT",
        parser=_target_format,
        help="Format to write; default: by the output's suffix, else as the first source.",
    ),
    summed: dict[str, Any] = _SUM,
    weight_maps: Strings = Option(
        None, "--map", metavar="MAP", help="One map for all sources, or one for each; - for none."
    ),
    how: dict[str, Any] = _MAP,
    chosen: dict[str, Any] = _CONVERSION,
    options: str | None = STORAGE,
    target_options: str | None = _TARGET_STORAGE,
) -> Answer:
    """Merge checkpoints of any format and sharding: the weighted sum, in constant memory.

    Repeat the command to resume a killed merge.
    """
    from dcp.conversion.run import merge

    run = [summed["run"]] if summed["run"] else []
    given = (storage_options(place, options) for place in (*(sources or ()), *summed["adapters"], *run))
    chosen |= {
        "map": _maps_of(weight_maps or [], how),
        "storage_options": next(filter(None, given), None),
        "target_options": storage_options(target, target_options),
    }
    with unwinding_on_sigterm():
        report = merge(sources or (), target, to=to, progress=True, **summed, **chosen)
    return Answer(report, lambda: _print_report(report))


def _print_report(report: ConversionReport) -> None:
    for name, weight in report.weights:
        printing.line(f"{weight:g} * {name}")
    seconds = report.seconds.get("total", 0.0)
    rate = f", {printing.size(int(report.bytes_written / seconds))}/s" if seconds > 0 else ""
    resumed = f", {report.tasks_resumed} of {report.tasks} parts reused from an earlier attempt"
    tensors, files = counted(report.tensor_count, "tensor"), counted(len(report.files), "file")
    wrote = f"{printing.size(report.bytes_written)} in {seconds:.1f} s{rate}"
    printing.line(f"{report.target}: {tensors} in {files}, {wrote}{resumed if report.tasks_resumed else ''}")
    if report.blocks_unverified:
        blocks = counted(report.blocks_unverified, "block")
        print(f"{blocks} of the source without a checksum: not verified")
    if report.dropped_objects:
        names = ", ".join(report.dropped_objects[:_MAX_LISTED])
        more = len(report.dropped_objects) - _MAX_LISTED
        printing.line(f"left out: {names}{f' and {more} more' if more > 0 else ''}")
    if report.unmerged:
        print(f"{counted(len(report.unmerged), 'integer tensor')} copied from the first source")


# -- maps ----------------------------------------------------------------------------------------------------


def _list_maps() -> Answer:
    """List the maps that come with the package."""
    from dcp.planners.weight_maps.weight_map import WeightMap, ready_maps

    found = {name: WeightMap.of(name).description for name in ready_maps()}
    return Answer(found, lambda: printing.table(("map", "what"), [*found.items()]))


def _check_map(
    weights: str = Argument(..., metavar="MAP", help="A name of `dcp map ls`, or a TOML or JSON file."),
    uri: str = Argument(..., metavar="SOURCE", help="A checkpoint of any format: path or URL."),
    how: dict[str, Any] = _MAP,
    only: Strings = ONLY,
    exclude: Strings = EXCLUDE,
    into: str | None = Option(
        None, metavar="CHECKPOINT", help="List tensors missing for a load into this checkpoint."
    ),
    top: int | None = TOP,
    options: str | None = STORAGE,
) -> Answer:
    """Show the result of a map for a checkpoint, without reading tensors. Exits with 1 if the map does not
    fit, or the result would not load."""
    from dcp.planners.weight_maps.mapped_index import map_index, misfits
    from dcp.storage.formats.opening import complete_index, open_source
    from dcp.storage.stores.opening import OpenWith

    found = _map_of(weights, how)
    try:
        source = open_source(uri, open_store=OpenWith(storage_options(uri, options)))
        mapped = map_index(complete_index(source.store, source.index), source.store, found, only, exclude)
    except PlanError as error:
        printing.line(str(error))
        raise typer.Exit(EXIT_FINDINGS) from None
    if into is None:
        fields = ("name", "shape", "sources", "padding", "is_renamed")
        data = [{field: getattr(tensor, field) for field in fields} for tensor in mapped.tensors]
        return Answer(data, lambda: _print_mapped(mapped.tensors, top))
    there = open_source(into, open_store=OpenWith(storage_options(into, options))).index
    wrong = [*misfits(mapped, there)]
    lacking = sum(one.kind != "unexpected" for one in wrong)

    def show() -> None:
        wanted = len(there.fqns)
        print(f"{wanted - lacking} of {counted(wanted, 'tensor')} fit")
        if wrong:
            printing.table(("what", "tensor", "wanted", "found"), wrong, top=top, what="tensor")

    return Answer([one._asdict() for one in wrong], show, EXIT_FINDINGS if lacking else 0)


def _print_mapped(tensors: Sequence[MappedTensor], top: int | None) -> None:
    sources = {name for tensor in tensors for name in tensor.sources}
    print(f"{counted(len(sources), 'tensor')} become {len(tensors)}")
    rows = []
    for one in tensors:
        zeros = f" and {one.padding} zeros" if one.padding else ""
        made = f"{', '.join(one.sources)}{zeros}{'' if one.is_renamed else ' (rearranged)'}"
        rows.append((one.name, printing.shape(one.shape), made))
    printing.table(("tensor", "shape", "made of"), rows, top=top, what="tensor")


MAP: Final[dict[str, Callable[..., Answer | None]]] = {"ls": _list_maps, "check": _check_map}

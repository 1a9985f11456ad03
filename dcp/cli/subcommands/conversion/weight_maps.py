"""``dcp map``: weight maps, which are there, and what one would make of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp.cli.common import (
    EXIT_FINDINGS,
    Debug,
    Json,
    Options,
    errors_as_lines,
    print_json,
    printable,
    storage_options,
)
from dcp.cli.subcommands.conversion.options import Exclude, Only
from dcp.cli.tables import Top, counted, print_rest, print_table, top_of

if TYPE_CHECKING:
    from dcp.planners.weight_maps.mapped_index import Misfit
    from dcp.planners.weight_maps.pieces import MappedTensor
    from dcp.planners.weight_maps.weight_map import WeightMap

__all__ = ["Below", "Config", "Inverse", "Sizes", "app", "map_of", "refuse_without_map"]

app = typer.Typer(
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

_Map = Annotated[str, typer.Argument(metavar="MAP", help="A name of `dcp map ls`, or a TOML or JSON file.")]


def map_of(
    name: str, config: str | None, sizes: list[str] | None, *, inverse: bool, below: str | None
) -> WeightMap:
    """The map that these options mean; ``below`` as for `dcp.weight_map`."""
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
    """A usage error if any of these is given, where no map is."""
    if inverse or below or config or sizes:
        raise typer.BadParameter("--inverse, --below, --config and --set are about --map, which is missing")


@app.command("ls")
def list_maps(json: Json = False) -> None:
    """The maps that come with the package."""
    from dcp.planners.weight_maps.weight_map import WeightMap, ready_maps

    found = {name: WeightMap.of(name).description for name in ready_maps()}
    if json:
        print_json(found)
    else:
        print_table(("map", "what"), list(found.items()))


@app.command("check")
def check(
    weights: _Map,
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
        from dcp.planners.weight_maps.mapped_index import map_source, misfits
        from dcp.storage.errors import PlanError
        from dcp.storage.formats.opening.sources import open_source
        from dcp.storage.stores.opening import OpenWith

        found = map_of(weights, config, sizes, inverse=inverse, below=below)
        try:
            mapped = map_source(
                uri,
                found,
                only=only or None,
                exclude=exclude or None,
                storage_options=storage_options(uri, options),
            )
        except PlanError as error:
            print(printable(str(error)))
            raise typer.Exit(EXIT_FINDINGS) from None
        if into is not None:
            there = open_source(into, open_store=OpenWith(storage_options(into, options)))
            _print_misfits([*misfits(mapped, there.index)], len(there.index.fqns), top, json=json)
            return
    tensors = mapped.tensors
    if json:
        print_json([_row(tensor) for tensor in tensors])
        return
    sources = {name for tensor in tensors for name in tensor.sources}
    print(f"{counted(len(sources), 'tensor')} become {len(tensors)}")
    rows: list[Sequence[str]] = [*map(_told, tensors)]
    print_table(("tensor", "shape", "made of"), top_of(rows, top))
    print_rest(rows, top, "tensor")


def _print_misfits(found: Sequence[Misfit], wanted: int, top: int | None, *, json: bool) -> None:
    """Exits with 1 where a load would fail."""
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


def _row(tensor: MappedTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": tensor.shape,
        "sources": tensor.sources,
        "padding": tensor.padding,
        "is_renamed": tensor.is_renamed,
    }


def _told(tensor: MappedTensor) -> tuple[str, str, str]:
    zeros = f" and {tensor.padding} zeros" if tensor.padding else ""
    moved = "" if tensor.is_renamed else " (rearranged)"
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return tensor.name, shape, f"{', '.join(tensor.sources)}{zeros}{moved}"

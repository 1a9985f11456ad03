"""``dcp convert``: a checkpoint of any format in another one."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from dcp.cli.common import Debug, Json, Options, errors_as_lines, print_json, storage_options
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
    target_formats,
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

__all__ = ["ConvertCommand", "command"]


class ConvertCommand(TyperCommand):
    """Says in its help which formats can be written; what is installed is looked at only then."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As of any command; where no format was given, the error says which there are."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is not None and error.param.name == "to" and not error.message:
                error.message = f"Choose from: {', '.join(target_formats())}"
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """As of any command."""
        with suppress(typer.BadParameter):  # help is there for whom a broken package is in the way, too
            known = "|".join(target_formats())
            for option in self.params:
                if option.name == "to":
                    option.metavar = f"[{known}]"
        super().format_help(ctx, formatter)


_Source = Annotated[str, typer.Argument(help="A checkpoint of any format: path or URL.")]
_Target = Annotated[str, typer.Argument(help="What to write: a folder or a file, path or URL.")]
_To = Annotated[
    str, typer.Option("--to", metavar="FORMAT", parser=target_format, help="The format to write.")
]
_Map = Annotated[
    str | None,
    typer.Option("--map", metavar="MAP", help="A weight map: a name of `dcp map ls`, or a file."),
]


def command(
    source: _Source,
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

    A conversion that was killed goes on where it was when the same command is given again. Of one that was
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

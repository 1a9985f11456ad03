"""What the tests of the pickle decoder allow."""

from __future__ import annotations

from typing import Any

from dcp.storage.formats.pickle.decoder import (
    Constructor,
    allow_list,
    decode_pickle,
    instances,
)

NOTHING = allow_list({}, what="the test")


SOME = allow_list(
    {
        ("torch", "Size"): Constructor("torch.Size", reduce=lambda args: tuple(args[0])),
        ("builtins", "bytes"): Constructor("bytes", reduce=lambda args: bytes(args[0])),
        ("m", "Thing"): instances("Thing"),
        ("m", "value"): "inert",
        ("collections", "OrderedDict"): Constructor("OrderedDict", reduce=lambda args: {}),
    },
    what="the test",
)


def decode(data: bytes, **named: Any) -> Any:
    """The value of a pickle in which no global is allowed."""
    return decode_pickle(data, find=NOTHING, **named)

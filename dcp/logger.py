"""Names of ``torch.distributed.checkpoint.logger``: torch's own logging hooks."""

from torch.distributed.checkpoint.logger import (
    _dcp_logger,
    _dcp_method_logger,
    _get_msg_dict,
    _init_logger,
    _msg_dict_from_dcp_method_args,
)

from dcp.calls.torch_names import names_of as _names_of

__all__ = [
    "_dcp_logger",
    "_dcp_method_logger",
    "_get_msg_dict",
    "_init_logger",
    "_msg_dict_from_dcp_method_args",
]

globals()["__getattr__"] = _names_of("logger")

"""Names of ``torch.distributed.checkpoint.state_dict``: torch's own helpers around models and optimizers.

They turn parallelised models and optimizers into state dicts of fully qualified names and back;
`dcp.save` and `dcp.load` take what they return.
"""

from typing import TYPE_CHECKING

from torch.distributed.checkpoint.state_dict import (
    FQNS_T,
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    StateDictOptions,
    ValueType,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from dcp.calls.torch_names import names_of

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

if not TYPE_CHECKING:
    __getattr__ = names_of("state_dict")

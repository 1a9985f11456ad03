"""A store that fails where a test says so, and logs what it was asked: the package's own."""

from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation

__all__ = ["Fault", "FaultInjectingStore", "Operation"]

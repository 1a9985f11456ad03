"""A store that fails where a test says so, and logs what it was asked: the package's own."""

from dcp.storage.stores.faults import Fault, FaultInjectingStore, StoreCall

__all__ = ["Fault", "FaultInjectingStore", "StoreCall"]

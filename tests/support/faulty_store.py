"""The package's own fault-injecting store: fails where a test requires, and logs its requests."""

from dcp.storage.stores.faults import Fault, FaultInjectingStore, StoreCall

__all__ = ["Fault", "FaultInjectingStore", "StoreCall"]

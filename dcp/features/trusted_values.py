"""Values of torch.save files whose pickles need code that is never run: loads of them are refused."""

from __future__ import annotations

from dcp.loading.feature import LoadFeature
from dcp.storage.errors import UnsafeObjectError
from dcp.storage.formats.index import CheckpointIndex

__all__ = ["TrustedValues"]

_MAX_LISTED = 20


class TrustedValues(LoadFeature):
    """Names such values: they are neither stored nor missing."""

    name = "trusted_values"

    def entries(self, index: CheckpointIndex) -> None:
        """Raise UnsafeObjectError for those that are to be loaded."""
        refused = index.provenance.get("refused_objects")
        if not isinstance(refused, dict) or not refused:
            return
        found = [name for name in map(self.call.stored, self.call.values) if name in refused]
        if found:
            shown = ", ".join(f"{name!r} (needs {refused[name]})" for name in found[:_MAX_LISTED])
            raise UnsafeObjectError(
                f"{len(found)} entries contain pickled objects that are not on the allow-list: {shown}. "
                "Nothing was run. Leave them out (exclude=...), or load the file with torch.load and save it "
                "again without them",
                fqns=found[:_MAX_LISTED],
            )

"""Which methods a path has: ``/checkpoints/facets`` is no checkpoint that is called facets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from fastapi.routing import RouteContext
from starlette.routing import compile_path

__all__ = ["Paths"]


class Paths:
    """The paths of all ``routes``. One that several templates fit is that one's which spells more of it.

    The framework would go on to the other template where this one has not the method, and take a word for a
    value: what there is at the path would then depend on the method.
    """

    def __init__(self, routes: Iterable[RouteContext]) -> None:
        self._methods: Final[defaultdict[str, set[str]]] = defaultdict(set)
        for route in routes:
            self._methods[str(route.path)] |= route.methods or set()
        self._patterns: Final = {template: compile_path(template)[0] for template in self._methods}
        self._spelled: Final = [
            pattern
            for template, pattern in self._patterns.items()
            if any(self._spells_more(template, other) for other in self._patterns)
        ]

    def methods(self, path: str) -> frozenset[str]:
        """The methods that ``path`` has; none if there is nothing."""
        fit = [template for template, pattern in self._patterns.items() if pattern.fullmatch(path)]
        own = [template for template in fit if not any(self._spells_more(other, template) for other in fit)]
        return frozenset().union(*(self._methods[template] for template in own))

    def is_refused(self, method: str, path: str) -> bool:
        """Whether the framework would take ``path``, which has not ``method``, for a value of another's."""
        return any(pattern.fullmatch(path) for pattern in self._spelled) and method not in self.methods(path)

    def _spells_more(self, template: str, other: str) -> bool:
        # "/a/{b}" is itself a path that fits "/a/{c}" and "/{d}/{e}"
        return bool(self._patterns[other].fullmatch(template)) and not self._patterns[template].fullmatch(
            other
        )

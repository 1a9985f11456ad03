"""The parts of a process of the service, made once from the settings and shared by all of its requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from dcp.server.core.allowances import Allowances, subjects_of
from dcp.server.core.roots import Roots
from dcp.server.core.security.accounts import NO_ROLES, RoleSettings
from dcp.server.core.security.callers import Callers
from dcp.server.core.security.principal import Principal
from dcp.server.core.security.rates import RateLimits
from dcp.server.core.settings import Settings
from dcp.server.database.engine import Database

if TYPE_CHECKING:
    from dcp.server.core.jobs.kind import Kind

T = TypeVar("T")


@dataclass(slots=True)
class Service:
    """The parts; safe to use from many threads. ``clock`` gives seconds since the epoch."""

    settings: Settings
    database: Database
    roots: Roots
    callers: Callers
    rates: RateLimits
    allowances: Allowances
    kinds: Mapping[str, Kind[Any]]
    clock: Callable[[], float] = field(default=time.time)
    _owned: dict[Any, Any] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        clock: Callable[[], float] = time.time,
        kinds: Mapping[str, Kind[Any]] = MappingProxyType({}),
        allowances: Callable[[Settings], Allowances] = Allowances,
        roles: RoleSettings = NO_ROLES,
    ) -> Service:
        """Opens nothing yet: a database or a storage that is away fails the requests that need it."""
        database = Database(settings.database_url.get_secret_value(), pool_size=settings.database_pool_size)
        return cls(
            settings=settings,
            database=database,
            roots=Roots(settings.roots, is_answering=True),
            callers=Callers(database, clock, roles),
            rates=RateLimits(settings.rate_limit, settings.login_limit),
            allowances=allowances(settings),
            kinds=kinds,
            clock=clock,
        )

    def count_request(self, caller: Principal) -> None:
        """Count a request of a key's caller. Raises `TooManyRequestsError` where it is one too many."""
        for subject, allowance in self.allowances.of(subjects_of(caller.owner, caller.key_id)).items():
            if allowance.requests is not None:
                self.rates.count(subject.text, allowance.requests)

    def own(self, kind: Callable[[Service], T]) -> T:
        """Return the object that a feature keeps for all requests of this process: made of the service by
        calling ``kind``, a class or a function, on first use."""
        with self._lock:
            if kind not in self._owned:
                self._owned[kind] = kind(self)
            return self._owned[kind]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the connections."""
        self.database.close()

"""Shared objects of a service process, made once from the settings."""

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
    """The shared objects of a process. Thread-safe. ``clock`` returns seconds since the epoch."""

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
        """Create the service without opening anything: an unreachable database or storage fails single
        requests."""
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
        """Count a request of the caller. Raises `TooManyRequestsError` above the rate limit."""
        for subject, allowance in self.allowances.of(subjects_of(caller.owner, caller.key_id)).items():
            if allowance.requests is not None:
                self.rates.count(subject.text, allowance.requests)

    def own(self, kind: Callable[[Service], T]) -> T:
        """Return the object of a feature shared by all requests of the process, created by ``kind(service)``
        on first use."""
        with self._lock:
            if kind not in self._owned:
                self._owned[kind] = kind(self)
            return self._owned[kind]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the connections."""
        self.database.close()

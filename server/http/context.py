"""What a process of the service has, made once from the settings and shared by all of its requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dcp.server.database.engine import Database
from dcp.server.roots import Roots
from dcp.server.security.keys import KeyRing
from dcp.server.security.rates import RateLimits
from dcp.server.settings import Settings

__all__ = ["Service"]


@dataclass(slots=True)
class Service:
    """The parts; safe to use from many threads. ``clock`` gives seconds since the epoch."""

    settings: Settings
    database: Database
    roots: Roots
    keys: KeyRing
    rates: RateLimits
    clock: Callable[[], float] = field(default=time.time)

    @classmethod
    def from_settings(cls, settings: Settings, clock: Callable[[], float] = time.time) -> Service:
        """Opens nothing yet: a database or a storage that is away fails the requests that need it."""
        database = Database(settings.database_url.get_secret_value(), pool_size=settings.database_pool_size)
        return cls(
            settings=settings,
            database=database,
            roots=Roots(settings.roots, is_answering=True),
            keys=KeyRing(database, clock),
            rates=RateLimits(settings.rate_limit, settings.login_limit),
            clock=clock,
        )

    def close(self) -> None:
        """Close the connections."""
        self.database.close()

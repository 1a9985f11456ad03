"""The environment of Alembic: migrations run on the connection and in the transaction of `upgrade`."""

from __future__ import annotations

from alembic import context

from dcp.server.database.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()

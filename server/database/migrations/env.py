"""What Alembic runs: the migrations, on the connection and in the transaction that `upgrade` gives."""

from __future__ import annotations

from alembic import context

from dcp.server.database.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()

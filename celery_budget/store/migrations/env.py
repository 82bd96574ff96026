"""Alembic's environment: runs on the connection :mod:`celery_budget.store.migrate` hands over."""

from alembic import context

from celery_budget.store.migrate import VERSION_TABLE
from celery_budget.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
)
with context.begin_transaction():
    context.run_migrations()

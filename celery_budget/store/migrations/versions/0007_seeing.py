"""What reports are counted from, which alerts were given, and what is told of one request."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

#: What is told of one request, beyond what its work needs.
TOLD: tuple[tuple[str, str, Any], ...] = (
    ("attempts", "error", sa.String(255)),
    ("attempts", "queue", sa.Text),
    ("attempts", "publishes", sa.Integer),
    ("attempts", "published_us", sa.BigInteger),
    ("reservations", "parked_us", sa.BigInteger),
    ("reservations", "unparked_us", sa.BigInteger),
    ("reservations", "parked_budget", sa.String(255)),
    ("reservations", "parked_reason", sa.String(16)),
)
#: And what it is found by.
FOUND_BY = (("journal", "reservation", "reservation_id"), ("reservations", "parent", "parent_id"))


def upgrade() -> None:
    _tell()


def downgrade() -> None:
    _tell_no_more()


def _tell() -> None:
    for table, name, kind in TOLD:
        op.add_column(f"budget_{table}", sa.Column(name, kind))
    for table, name, column in FOUND_BY:
        given = sa.text(f"{column} IS NOT NULL")
        op.create_index(
            f"ix_budget_{table}_{name}",
            f"budget_{table}",
            ["root", column],
            postgresql_where=given,
            sqlite_where=given,
        )


def _tell_no_more() -> None:
    for table, name, _ in FOUND_BY:
        op.drop_index(f"ix_budget_{table}_{name}", f"budget_{table}")
    for table, name, _ in reversed(TOLD):
        op.drop_column(f"budget_{table}", name)

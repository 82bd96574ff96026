"""Requests that are admitted though they do not fit, where nothing is enforced."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "budget_reservations",
        sa.Column("enforced", sa.Boolean, nullable=False, server_default=sa.true()),
    )
    op.add_column("budget_reservations", sa.Column("waived", sa.Text))
    op.add_column(
        "budget_refusals",
        sa.Column("amount", sa.BigInteger, nullable=False, server_default="0"),
    )


def downgrade() -> None:
    op.execute("DELETE FROM budget_refusals WHERE reason LIKE 'waived:%'")
    op.drop_column("budget_refusals", "amount")
    op.drop_column("budget_reservations", "waived")
    op.drop_column("budget_reservations", "enforced")

"""What reports are counted from, and which alerts were given."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_alerts()


def downgrade() -> None:
    _drop_alerts()


def _create_alerts() -> None:
    op.add_column("budget_budgets", sa.Column("alert_at", sa.String(255)))
    op.create_table(
        "budget_alerts",
        sa.Column("root", sa.String(255)),
        sa.Column("kind", sa.String(32)),
        sa.Column("subject", sa.Text),
        sa.Column("window_us", sa.BigInteger),
        sa.Column("threshold", sa.BigInteger),
        sa.Column("alert_id", sa.Uuid, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("due_us", sa.BigInteger, nullable=False),
        sa.Column("since_us", sa.BigInteger, nullable=False),
        sa.Column("told_us", sa.BigInteger),
        sa.Column("end_us", sa.BigInteger, nullable=False, server_default=str(2**63 - 1)),
        sa.Column("said", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint(
            "root", "kind", "subject", "window_us", "threshold", name="pk_budget_alerts"
        ),
    )
    due = sa.text("state = 'due'")
    op.create_index(
        "ix_budget_alerts_due",
        "budget_alerts",
        ["root", "due_us"],
        postgresql_where=due,
        sqlite_where=due,
    )
    op.create_index("ix_budget_alerts_end", "budget_alerts", ["root", "end_us"])
    op.create_table(
        "budget_alert_looks",
        sa.Column("root", sa.String(255)),
        sa.Column("what", sa.String(32)),
        sa.Column("looked_us", sa.BigInteger, nullable=False),
        sa.Column("after_name", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("root", "what", name="pk_budget_alert_looks"),
    )


def _drop_alerts() -> None:
    op.drop_table("budget_alert_looks")
    op.drop_table("budget_alerts")
    op.drop_column("budget_budgets", "alert_at")

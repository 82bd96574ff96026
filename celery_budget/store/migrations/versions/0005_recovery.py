"""Children's processes, second looks at lapsed leases, lost attempts that are asked about."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("budget_attempts", sa.Column("pid", sa.Integer))
    op.add_column("budget_attempts", sa.Column("suspected_us", sa.BigInteger))
    for column in ("rerun", "inquires"):
        op.add_column(
            "budget_attempts",
            sa.Column(column, sa.Boolean, nullable=False, server_default=sa.false()),
        )
    # Those that run while the schema is changed.
    op.execute(
        "UPDATE budget_attempts SET rerun = late_ack"
        " WHERE lease_until_us IS NOT NULL AND ended_us IS NULL"
    )
    op.create_table(
        "budget_sweeps",
        sa.Column("root", sa.String(255)),
        sa.Column("seen_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("root", name="pk_budget_sweeps"),
    )


def downgrade() -> None:
    op.drop_table("budget_sweeps")
    for column in ("inquires", "rerun", "suspected_us", "pid"):
        op.drop_column("budget_attempts", column)

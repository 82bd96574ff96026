"""Sessions of SQLAlchemy, whose unit of work says late what it has to say."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy import orm

from celery_budget.errors import BudgetExceeded, EnlistError
from tests.integration.enlist.support import Caller, Sqlalchemy


class Base(orm.DeclarativeBase):
    """Tables of this test."""


class Order(Base):
    """A business row."""

    __tablename__ = "orders"

    number: orm.Mapped[int] = orm.mapped_column(primary_key=True)


@pytest.fixture
def orders(either: Caller) -> sa.Engine:
    """An engine of the caller's own."""
    assert isinstance(either.client, Sqlalchemy)
    Base.metadata.create_all(either.client.engine)
    return either.client.engine


def numbers(engine: sa.Engine) -> list[int]:
    with orm.Session(engine) as session:
        return sorted(session.scalars(sa.select(Order.number)))


def test_rows_are_written_before_budgets_are_locked(either: Caller, orders: sa.Engine) -> None:
    with orm.Session(orders) as session, session.begin():
        with either.shop.budget.enlist(session):
            session.add(Order(number=1))
            either.draft.delay("a", 3)
            assert session.new
        assert not session.new
    assert numbers(orders) == [1]
    assert either.committed() == ([], 3, 1)


def test_what_is_not_flushed_by_itself_is_left(either: Caller, orders: sa.Engine) -> None:
    with orm.Session(orders, autoflush=False) as session, session.begin():
        with either.shop.budget.enlist(session):
            session.add(Order(number=1))
            either.draft.delay("a", 3)
        assert session.new
    assert numbers(orders) == [1]
    assert either.committed() == ([], 3, 1)


def test_a_row_that_cannot_be_written_takes_all_with_it(either: Caller, orders: sa.Engine) -> None:
    with orm.Session(orders) as session:
        session.add(Order(number=1))
        session.commit()

    def order(session: orm.Session) -> None:
        with session.begin(), either.shop.budget.enlist(session):
            session.execute(sa.insert(Order).values(number=2))
            either.draft.delay("a", 3)
            session.add(Order(number=1))

    with orm.Session(orders) as session, pytest.raises(sa.exc.IntegrityError):
        order(session)
    assert numbers(orders) == [1]
    assert either.committed() == ([], 0, 0)
    # The block has been left.
    either.draft.delay("a", 1)
    assert either.committed() == ([], 1, 1)


def test_what_is_published_while_rows_are_written_is_part_of_it(
    either: Caller, orders: sa.Engine
) -> None:
    with orm.Session(orders) as session, session.begin():

        @sa.event.listens_for(session, "after_flush")
        def publish(session: orm.Session, context: object) -> None:
            either.draft.delay("a", 2)

        with either.shop.budget.enlist(session):
            session.add(Order(number=1))
        assert either.committed() == ([], 0, 0)
    assert either.committed() == ([], 2, 1)


def test_an_object_is_usable_after_a_refusal(either: Caller, orders: sa.Engine) -> None:
    with orm.Session(orders) as session, session.begin():
        order = Order(number=1)
        session.add(order)
        with pytest.raises(BudgetExceeded), either.shop.budget.enlist(session):
            either.draft.delay("a", 11)
        assert order.number == 1
        with either.shop.budget.enlist(session):
            either.draft.delay("a", 10)
    assert numbers(orders) == [1]
    assert either.committed() == ([], 10, 1)


def test_a_session_that_begins_nothing_by_itself(either: Caller, orders: sa.Engine) -> None:
    with orm.Session(orders, autobegin=False) as session:
        with (
            pytest.raises(EnlistError, match="this cannot be enlisted"),
            either.shop.budget.enlist(session),
        ):
            pass
        with session.begin(), either.shop.budget.enlist(session):
            either.draft.delay("a", 1)
    assert either.committed() == ([], 1, 1)

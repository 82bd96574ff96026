"""Directives that write reference pages from the code: the command line, the tables, the errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import click
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sqlalchemy import Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex

from celery_budget import errors
from celery_budget.cli import budget
from celery_budget.store.schema import metadata

#: What the command is called as.
PROGRAM = "celery -A PROJ budget"
#: Characters of a line of help.
WIDTH = 90


def commands(
    command: click.Command, name: str = PROGRAM, parent: click.Context | None = None
) -> Iterator[tuple[str, click.Context]]:
    """Yield each command with its name on the command line, the group first, then by name."""
    context = click.Context(
        command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
    )
    full = f"{parent.command_path} {name}" if parent else name
    yield full, context
    if isinstance(command, click.Group):
        for one in sorted(command.commands):
            yield from commands(command.commands[one], one, context)


class Titled(SphinxDirective):
    """A directive that makes sections, each with an anchor that links can name."""

    def section(self, title: str, anchor: str, *content: nodes.Node) -> nodes.section:
        """Return a section whose title is code."""
        made = nodes.section(ids=[anchor], names=[anchor])
        made += nodes.title("", "", nodes.literal(text=title))
        made.extend(content)
        self.state.document.note_explicit_target(made)
        return made

    def table(self, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> nodes.table:
        """Return a table; a cell that begins and ends with a backtick is code."""
        group = nodes.tgroup(cols=len(head))
        group.extend(nodes.colspec(colwidth=1) for _ in head)
        group += nodes.thead("", _row(head))
        group += nodes.tbody("", *map(_row, rows))
        return nodes.table("", group, classes=["colwidths-auto"])


def _row(cells: tuple[str, ...]) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        code = len(cell) > 1 and cell[0] == cell[-1] == "`"
        text = nodes.literal(text=cell[1:-1]) if code else nodes.Text(cell)
        row += nodes.entry("", nodes.paragraph("", "", text))
    return row


class CommandLine(Titled):
    """``command-line``: what each command says of itself."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each command."""
        made: list[nodes.Node] = []
        for name, context in commands(budget):
            help_ = nodes.literal_block(text=context.get_help(), language="text")
            short = name.removeprefix("celery -A PROJ ")
            made.append(self.section(short, short.replace(" ", "-"), help_))
        return made


class Schema(Titled):
    """``ledger-schema``: each table with its columns, keys and indexes."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each table."""
        return [self._table(one) for one in sorted(metadata.tables.values(), key=lambda t: t.name)]

    def _table(self, table: Table) -> nodes.section:
        dialect = postgresql.dialect()
        rows = [
            (
                f"`{column.name}`",
                f"`{column.type.compile(dialect=dialect).lower()}`",
                "yes" if column.nullable else "no",
                "yes" if column.primary_key else "",
            )
            for column in table.columns
        ]
        content: list[nodes.Node] = [self.table(("column", "type", "null", "primary key"), rows)]
        indexes = sorted(table.indexes, key=lambda index: str(index.name))
        if indexes:
            told = ";\n".join(
                str(CreateIndex(index).compile(dialect=dialect)).replace(", ", ", ")
                for index in indexes
            )
            content.append(nodes.literal_block(text=f"{told};", language="sql"))
        return self.section(table.name, table.name, *content)


class Tree(Titled):
    """``error-tree``: every error under the one it is a kind of, with what it means."""

    option_spec: ClassVar[dict[str, Any]] = {"class": directives.class_option}

    def run(self) -> list[nodes.Node]:
        """Return a nested list."""
        return [self._below(errors.BudgetError)]

    def _below(self, error: type[Exception]) -> nodes.bullet_list:
        item = nodes.list_item()
        told = " ".join((error.__doc__ or "").split("\n\n")[0].split())
        text = nodes.Text(f": {_plain(told)}")
        item += nodes.paragraph("", "", nodes.literal(text=error.__name__), text)
        made = nodes.bullet_list("", item)
        for one in sorted(error.__subclasses__(), key=lambda one: one.__name__):
            if one.__name__ in errors.__all__:
                item += self._below(one)
        return made


def _plain(text: str) -> str:
    """Return a line of reST without its marks."""
    return text.replace(":class:`~celery_budget.", "").replace("`", "")


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.add_directive("command-line", CommandLine)
    app.add_directive("ledger-schema", Schema)
    app.add_directive("error-tree", Tree)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Reports as plain data, and how they are written: aligned text, rich's tables for a terminal, JSON."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table as RichTable

WIDTH = 80
"""Columns that text may take."""
_LABEL = 28


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        title: What stands above it.
        rows: The cells; the first column is aligned left, the others right.
        header: Names of the columns; empty for a list of (label, value) facts, whose values are aligned left.
        note: What stands below it.
    """

    title: str
    rows: tuple[tuple[str, ...], ...]
    header: tuple[str, ...] = ()
    note: str = ""


def plain(tables: Sequence[Table], width: int = WIDTH) -> str:
    """Tables as text of at most `width` columns (ASCII only, as far as the cells are), without a trailing newline.

    Example:
        >>> print(plain([Table("Sizes", (("3 to 61", "2.0"),), header=("tokens", "units recomputed"))]))
        Sizes
        -----
        tokens   units recomputed
        3 to 61               2.0
    """
    return "\n\n".join("\n".join(_lines(table, width)) for table in tables)


def shorten(text: str, width: int) -> str:
    """Cut in the middle, where names of modules say least.

    Example:
        >>> shorten("bert.encoder.layer.11.attention", 20)
        'bert.enco...ttention'
    """
    if len(text) <= width:
        return text
    head = (width - 3 + 1) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def _lines(table: Table, width: int) -> Iterator[str]:
    yield table.title
    yield "-" * min(width, len(table.title))
    if not table.header:
        label_width = max([len(row[0]) for row in table.rows] + [_LABEL])
        for label, value in table.rows:
            first, *more = textwrap.wrap(value, width - label_width - 2) or [""]
            yield f"{label:<{label_width}}  {first}".rstrip()
            yield from (" " * (label_width + 2) + line for line in more)
    else:
        cells = [table.header, *table.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        widths[0] = min(widths[0], max(_LABEL, width - sum(widths[1:]) - 2 * (len(widths) - 1)))
        for row in cells:
            first = shorten(row[0], widths[0]).ljust(widths[0])
            rest = (cell.rjust(column) for cell, column in zip(row[1:], widths[1:], strict=True))
            yield "  ".join([first, *rest]).rstrip()
    if table.note:
        yield from textwrap.wrap(table.note, width)


def rich_tables(tables: Sequence[Table]) -> Iterator[RichTable]:
    """The same for a terminal; needs rich (the extra `cli`)."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    for table in tables:
        shown = RichTable(
            title=Text(table.title, style="bold"),
            title_justify="left",
            caption=Text(table.note) if table.note else None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            show_header=bool(table.header),
            pad_edge=False,
        )
        columns = table.header or ("", "")
        for index, name in enumerate(columns):
            left = index == 0 or not table.header
            shown.add_column(
                Text(name),
                justify="left" if left else "right",
                style="cyan" if index == 0 else None,
                overflow="fold",
                min_width=_LABEL if left and index == 0 and not table.header else None,
            )
        for row in table.rows:
            shown.add_row(*map(Text, row))
        yield shown


def write_json(path: str | os.PathLike[str], content: Any) -> Path:
    """Write plain data to a file; folders are made where missing.

    Returns:
        The path written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return target

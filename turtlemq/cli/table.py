"""Tables of the verbs: no cell of a column is cut, except of those that may shrink, such as bodies and errors.

In a pipe each column is as wide as its widest cell. A terminal that is too narrow for that gets shorter shrinking columns first;
then long names are folded, over several lines. `rich`, which draws on terminals, is slow to load and not needed for pipes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

GAP = 2  # spaces between two columns
# The least widths of shrinking columns and of folded ones: tried in this order. Times have 19 characters.
_LEAST = ((12, 20), (4, 8))


class Table:
    """Rows of text under a header. Rows that were printed are dropped; later ones get at least the same widths."""

    def __init__(
        self, columns: Collection[str], left: int = 1, shrink: Collection[str] = (), whole: Collection[str] = ()
    ) -> None:
        self._columns = list(columns)
        self._left = left
        self._shrinks = [name in shrink for name in columns]
        self._whole = [name in whole for name in columns]
        self._rows: list[tuple[str, ...]] = []
        self._widths = [len(name) for name in columns]
        self._has_header = True

    def add_row(self, *cells: str) -> None:
        """Add a row. It may have fewer cells than there are columns."""
        self._rows.append(cells)
        for number, cell in enumerate(cells):
            self._widths[number] = max(self._widths[number], len(cell))

    def printed(self) -> None:
        """Drop the rows and the header: they were printed."""
        self._rows, self._has_header = [], False

    def lines(self) -> Iterator[str]:
        """The lines for a pipe, at full width. They count as printed."""
        rows = [tuple(self._columns), *self._rows] if self._has_header else self._rows
        for row in rows:
            cells = zip(row, self._widths, range(len(row)), strict=False)
            padded = [cell.ljust(width) if number < self._left else cell.rjust(width) for cell, width, number in cells]
            yield (" " * GAP).join(padded).rstrip()
        self.printed()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the table for a terminal."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold", show_header=self._has_header)
        kinds = enumerate(zip(self._shrinks, self._whole, strict=True))
        folds = [not shrinks and not whole and number < self._left for number, (shrinks, whole) in kinds]
        widths = fitted(self._widths, self._shrinks, folds, options.max_width - GAP * len(self._widths))
        for number, (name, width, shrinks) in enumerate(zip(self._columns, widths, self._shrinks, strict=True)):
            table.add_column(
                Text(name),
                justify="left" if number < self._left else "right",
                style="cyan" if number == 0 else None,
                width=width,
                no_wrap=shrinks,
                overflow="ellipsis" if shrinks else "fold",
            )
        for row in self._rows:
            table.add_row(*map(Text, row))
        yield table


def fitted(widths: list[int], shrinks: list[bool], folds: list[bool], room: int) -> list[int]:
    """Widths of columns that need no more than `room`, if that is possible: the widest of those that shrink give way first, then
    the widest of those that fold.

    >>> fitted([30, 19, 40], [False, False, True], [True, True, False], 80)
    [30, 19, 31]
    >>> fitted([60, 19, 40], [False, False, True], [True, True, False], 80)
    [49, 19, 12]
    """
    out = list(widths)
    for least_shrunk, least_folded in _LEAST:
        for which, least in ((shrinks, least_shrunk), (folds, least_folded)):
            while sum(out) > room and (wide := [n for n, chosen in enumerate(which) if chosen and out[n] > least]):
                out[max(wide, key=out.__getitem__)] -= 1
    return out

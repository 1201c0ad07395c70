"""Tables for people: columns as wide as they have to be."""

from collections.abc import Sequence

__all__ = ["aligned"]


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> str:
    """Lines of a table.

    Args:
        header: Names of the columns.
        rows: A text for each column.
        left: Columns of words; the others are numbers, and aligned at their right.
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [
            text.ljust(width) if name in left else text.rjust(width)
            for name, text, width in zip(header, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)

"""Rows of Markdown tables."""


def row(cells):
    """One line of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def table(columns, lines):
    """A table of `lines`, lists of cells. columns: {heading: "---" or, to the right, "--:"}."""
    return "\n".join([row(columns), row(columns.values()), *map(row, lines)])


def folded(summary, text):
    """`text` behind a line that opens it."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"

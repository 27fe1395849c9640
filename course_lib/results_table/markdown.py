"""What Markdown pages are made of."""


def percent(share, digits=0):
    """A share, such as 0.12, in words that no line ends in: "12 %"."""
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"


def row(cells):
    """One line of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def table(columns, lines):
    """A table of `lines`, lists of cells. columns: {heading: "---" or, to the right, "--:"}."""
    return "\n".join([row(columns), row(columns.values()), *map(row, lines)])


def folded(summary, text):
    """`text` behind a line that opens it."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"

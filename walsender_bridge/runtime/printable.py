r"""Foreign text (a table's name, a server's message) made safe for a terminal and for a line of a file.

A name may contain a newline, after which it would begin a line of its own, and terminal control sequences. Every
character that is not printable is shown as Python and JSON write it: `\n`, `\x1b`, `\u202e`.
"""


def printable(text: str, *, lines: bool = False) -> str:
    """The text in one line, or (`lines`) with its lines' ends kept; nothing in it moves a cursor or changes a color."""
    if text.isprintable():
        return text
    return "".join(
        each
        if each.isprintable() or (lines and each in "\n\t")
        else each.encode("unicode_escape").decode()
        for each in text
    )

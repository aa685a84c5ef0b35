r"""Texts of others (a table's name, a server's message) on a terminal and in a line of a file.

A name may hold a line's end, with which it would begin a line of its own, and bytes that a terminal obeys. Whatever is not
printable is shown as Python and JSON write it: `\n`, `\x1b`, `\u202e`.
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

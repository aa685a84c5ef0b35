"""A column's name as SQL has it: folded to lower case, or literal in double quotes. Pure."""

import re
from typing import Final

#: A name, as a part of a regular expression.
NAME: Final = r'(?:"(?:[^"]|"")+"|[^\W\d][\w$]*)'


def unquoted(name: str) -> str:
    """The column that is meant by a text that matches `NAME`."""
    return name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()


def column_name(text: str) -> str:
    """The column that is meant. Raises `ValueError` for a text that is no name."""
    text = text.strip()
    if not re.fullmatch(NAME, text):
        raise ValueError(f"{text!r} is not a column; write it in double quotes, if SQL needs them")
    return unquoted(text)

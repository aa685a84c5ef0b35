"""The token of `[metrics] token_file`, by which a scraper of another account of this machine is answered."""

import hmac
import os
from pathlib import Path
from typing import Final

from walsender_bridge.errors import ConfigError
from walsender_bridge.runtime import secret_file

#: Characters: fewer could be guessed.
_SHORTEST: Final = 16
_LONGEST: Final = 4096


class ScrapeToken:
    """See the module. The file is read at each request that has a token, so a replaced one counts at once.

    Raises `ConfigError` for a file that cannot be read, that others can read, or that has no such token.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read()

    def is_in(self, header: str) -> bool:
        """Whether it is in this header `Authorization`. Raises `ConfigError` as the constructor."""
        scheme, _, given = header.partition(" ")
        found = hmac.compare_digest(given.strip().encode(), self._read())
        return found and scheme.lower() == "bearer"

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                its, content = os.fstat(file.fileno()), file.read(_LONGEST)
        except OSError as error:
            raise self._unfit(f"the token cannot be read: {error.strerror}") from None
        secret_file.check(
            self._path,
            its,
            "token",
            "write another token, as this one may be known; chmod 600 the file",
        )
        token = content.strip()
        if len(token) < _SHORTEST or not token.isascii():
            raise self._unfit(f"the file has no token of {_SHORTEST} or more characters")
        return token

    def _unfit(self, what: str) -> ConfigError:
        return ConfigError(
            what,
            where=str(self._path),
            repair="write one: (umask 077; openssl rand -hex 32 > FILE), and give the scraper a copy",
        )

"""The file with the record of the newest link (`newest`)."""

import contextlib
import os
import uuid
from dataclasses import asdict
from pathlib import Path

from spark_consumers.lake.manifest.newest import ChainLink, PublishedLink
from spark_consumers.lake.manifest.sealed_json import dump, load
from walsender_bridge.errors import CorruptError, FencedError


class NewestRecord:
    """The record of one lake; `state` is its folder `_tuskline`."""

    def __init__(self, state: Path) -> None:
        self._file = state / "newest.json"

    def read(self) -> PublishedLink | None:
        """The recorded link; None if there is none. Raises `CorruptError` for a damaged file."""
        try:
            record = load(self._file)
            return PublishedLink(record["link"], record["epoch"], record["term"])
        except FileNotFoundError:
            return None
        except (CorruptError, KeyError) as error:
            what = error.what if isinstance(error, CorruptError) else f"lacks {error}"
            raise CorruptError(
                what,
                where=str(self._file),
                repair="remove it: the lake's driver recreates it with its next link",
            ) from None

    def record(self, link: ChainLink) -> None:
        """Record that this link was published. A link older than the recorded one changes nothing."""
        before = self._known()
        if before is not None and before.link >= link.link:
            return
        draft = self._file.with_name(f".{self._file.name}.{uuid.uuid4().hex}.tmp")
        try:
            with draft.open("xb") as file:
                file.write(dump(asdict(PublishedLink(link.link, link.epoch, link.term))))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._file)
        finally:
            draft.unlink(missing_ok=True)

    def fence(self, link: ChainLink) -> None:
        """Raise `FencedError` if a writer of a higher term than this link's has recorded one, even if it is lost."""
        recorded = self._known()
        if recorded is not None and recorded.term > link.term:
            raise FencedError(
                f"cannot publish link {link.link}: term {link.term} has ended, "
                f"term {recorded.term} is at link {recorded.link}",
                where=str(self._file),
                repair="no action is needed: the newer writer continues",
            )

    def _known(self) -> PublishedLink | None:
        with contextlib.suppress(CorruptError):
            return self.read()
        return None

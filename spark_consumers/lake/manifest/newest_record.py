"""The file with the record of the newest link (`newest`)."""

import contextlib
from dataclasses import asdict

from spark_consumers.lake.manifest.newest import ChainLink, PublishedLink
from spark_consumers.lake.manifest.sealed_json import dump, load
from spark_consumers.lake.store.lake_store import STATE, LakeStore
from walsender_bridge.errors import CorruptError, FencedError

_FILE = f"{STATE}/newest.json"


class NewestRecord:
    """The record of one lake."""

    def __init__(self, store: LakeStore) -> None:
        self._store = store

    def read(self) -> PublishedLink | None:
        """The recorded link; None if there is none. Raises `CorruptError` for a damaged file."""
        try:
            record = load(self._store, _FILE)
            return PublishedLink(record["link"], record["epoch"], record["term"])
        except FileNotFoundError:
            return None
        except (CorruptError, KeyError) as error:
            what = error.what if isinstance(error, CorruptError) else f"lacks {error}"
            raise CorruptError(
                what,
                where=self._store.where(_FILE),
                repair="remove it: the lake's driver recreates it with its next link",
            ) from None

    def record(self, link: ChainLink) -> None:
        """Record that this link was published. A link older than the recorded one changes nothing."""
        before = self.known()
        if before is not None and before.link >= link.link:
            return
        made = PublishedLink(link.link, link.epoch, link.term)
        self._store.replace(_FILE, dump(asdict(made)))

    def fence(self, link: ChainLink) -> None:
        """Raise `FencedError` if a writer of a higher term than this link's has recorded one, even if it is lost."""
        recorded = self.known()
        if recorded is not None and recorded.term > link.term:
            raise FencedError(
                f"cannot publish link {link.link}: term {link.term} has ended, "
                f"term {recorded.term} is at link {recorded.link}",
                where=self._store.where(_FILE),
                repair="no action is needed: the newer writer continues",
            )

    def known(self) -> PublishedLink | None:
        """The recorded link; None if there is none, or it cannot be read."""
        with contextlib.suppress(CorruptError):
            return self.read()
        return None

"""How much old WAL a safekeeper may remove. Pure."""

from collections.abc import Iterable


def horizon(
    *,
    restart_lsn: int,
    commit_lsn: int,
    flush_lsn: int,
    slots: Iterable[int] = (),
    archived_lsn: int | None = None,
    keep_bytes: int = 0,
    full: bool = False,
) -> int:
    """Below this LSN nobody needs WAL from here: the least of all that holds it.

    `restart_lsn`: every safekeeper has it. `slots`: where readers with a slot go on. `archived_lsn`: up to here it
    is in the archive (None: there is none). `keep_bytes`: the retention setting, counted back from `flush_lsn`; what
    nobody needs gives way when the disk is `full`, or it would stop commits.
    """
    bounds = [restart_lsn, commit_lsn, flush_lsn - (0 if full else keep_bytes), *slots]
    if archived_lsn is not None:
        bounds.append(archived_lsn)
    return max(0, min(bounds))

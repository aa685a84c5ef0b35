-- The metadata repository's own file (SQLite): see walsender_bridge/change_log/repository/store.py.
CREATE TABLE record (
    number INTEGER PRIMARY KEY,
    body TEXT NOT NULL,
    crc INTEGER -- CRC32C of the row's other values; NULL in rows of format 1, here and below
) STRICT;

CREATE TABLE checkpoint (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    number INTEGER NOT NULL, -- of the last record that is folded in
    body TEXT NOT NULL,
    crc INTEGER
) STRICT;

-- The checkpoint's commits: version -> stream, local range, global range (JSON arrays).
CREATE TABLE commits (
    stream TEXT NOT NULL,
    version INTEGER NOT NULL,
    context TEXT NOT NULL,
    position TEXT NOT NULL,
    crc INTEGER,
    PRIMARY KEY (stream, version)
) STRICT, WITHOUT ROWID;

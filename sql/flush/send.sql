-- The one-row table that a flush writes to: a change that every capture is sure to see.
CREATE SCHEMA IF NOT EXISTS tuskline;
COMMENT ON SCHEMA tuskline IS 'Belongs to Tuskline; see tuskline.flush and tuskline.provisioned.';
CREATE TABLE IF NOT EXISTS tuskline.flush (
    id integer PRIMARY KEY CHECK (id = 1),
    token bigint NOT NULL DEFAULT 0,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE tuskline.flush IS 'Tuskline writes here to mark a moment in the log. One row, published.';
-- What Tuskline has made on this server, so that `tuskline detach` takes back this and nothing else.
CREATE TABLE IF NOT EXISTS tuskline.provisioned (
    slot text NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    privilege text NOT NULL DEFAULT '',
    grantee text NOT NULL DEFAULT '',
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (slot, kind, name, privilege, grantee)
);
COMMENT ON TABLE tuskline.provisioned IS
    'What Tuskline has made: for the source with this slot, or (no slot) for all sources of this database.';

-- The one-row table that a flush writes to: a change that every capture is sure to see.
CREATE SCHEMA tuskline;
COMMENT ON SCHEMA tuskline IS 'Belongs to Tuskline; see tuskline.flush.';
CREATE TABLE tuskline.flush (
    id integer PRIMARY KEY CHECK (id = 1),
    token bigint NOT NULL DEFAULT 0,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE tuskline.flush IS 'Tuskline writes here to mark a moment in the log. One row, published.';
INSERT INTO tuskline.flush (id) VALUES (1);

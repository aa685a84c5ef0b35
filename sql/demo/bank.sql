-- The demo's bank. A transfer touches three tables in one transaction, so a reader that saw half of one
-- would find the sums broken. The other tables are there for what replication finds hard: a changing key,
-- a table without one, values kept out of line, and TRUNCATE.
CREATE SCHEMA bank;

CREATE TABLE bank.accounts (
    id integer PRIMARY KEY,
    owner text NOT NULL,
    balance numeric(14, 2) NOT NULL,
    moves bigint NOT NULL DEFAULT 0,
    opened date NOT NULL,
    rating real,
    tags text[] NOT NULL,
    profile jsonb NOT NULL
);

CREATE TABLE bank.transfers (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    from_account integer NOT NULL,
    to_account integer NOT NULL,
    amount numeric(14, 2) NOT NULL,
    made_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    memo text
);

-- No key: equal rows are allowed and happen.
CREATE TABLE bank.audit (
    transfer uuid NOT NULL,
    account integer NOT NULL,
    delta numeric(14, 2) NOT NULL,
    noted_at timestamp NOT NULL DEFAULT date_trunc('second', localtimestamp)
);
CREATE INDEX audit_transfer ON bank.audit (transfer);
ALTER TABLE bank.audit REPLICA IDENTITY FULL;

-- Cards move to another slot: their key changes.
CREATE TABLE bank.cards (
    account integer NOT NULL,
    slot smallint NOT NULL,
    number varchar(19) NOT NULL,
    credit numeric,
    frozen boolean NOT NULL DEFAULT false,
    pin bytea NOT NULL,
    PRIMARY KEY (account, slot)
);

-- Bodies are stored out of line, so an UPDATE of the title does not send them.
CREATE TABLE bank.documents (
    id bigint PRIMARY KEY,
    account integer NOT NULL,
    title varchar(80) NOT NULL,
    body text NOT NULL,
    pages integer[] NOT NULL
);
ALTER TABLE bank.documents ALTER COLUMN body SET STORAGE EXTERNAL;

-- Filled and truncated again and again.
CREATE TABLE bank.daily (
    bucket integer PRIMARY KEY,
    total double precision NOT NULL,
    seen smallint NOT NULL
);

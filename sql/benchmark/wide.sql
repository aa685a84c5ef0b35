-- Twelve columns of text of different nature and length, about 250 bytes a row.
CREATE TABLE wide (
    id text PRIMARY KEY,
    email text,
    first_name text,
    last_name text,
    street text,
    city text,
    country text,
    phone text,
    token text,
    agent text,
    created text,
    note text
);

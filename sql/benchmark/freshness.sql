-- Ten tables, and a function whose call changes one row of each: its number, which the function returns, becomes that row's.
CREATE SEQUENCE numbers;
DO $$
DECLARE
    body text := '';
BEGIN
    FOR i IN 0..9 LOOP
        EXECUTE format('CREATE TABLE f%s (id bigint PRIMARY KEY, n bigint NOT NULL, v text)', i);
        EXECUTE format('INSERT INTO f%s SELECT g, 0, ''value '' || g FROM generate_series(0, 9999) g', i);
        body := body || format('UPDATE f%s SET n = k WHERE id = k %% 10000; ', i);
    END LOOP;
    EXECUTE format(
        'CREATE FUNCTION change() RETURNS bigint LANGUAGE plpgsql AS %L',
        'DECLARE k bigint := nextval(''numbers''); BEGIN ' || body || 'RETURN k; END');
END
$$;

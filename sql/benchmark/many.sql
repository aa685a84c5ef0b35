-- A hundred tables, and a function whose call changes one row of one of them, in turn: its number, which the function returns, becomes that row's.
CREATE SEQUENCE numbers_of_many;
DO $$
BEGIN
    FOR i IN 0..99 LOOP
        EXECUTE format('CREATE TABLE m%s (id bigint PRIMARY KEY, n bigint NOT NULL, v text)', i);
        EXECUTE format('INSERT INTO m%s SELECT g, 0, ''value '' || g FROM generate_series(0, 9999) g', i);
    END LOOP;
END
$$;
CREATE FUNCTION change_one() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    k bigint := nextval('numbers_of_many');
BEGIN
    EXECUTE format('UPDATE m%s SET n = $1 WHERE id = $2', k % 100) USING k, k / 100 % 10000;
    RETURN k;
END
$$;

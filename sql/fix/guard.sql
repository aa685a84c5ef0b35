-- What another role has made there would run with the rights of the one who runs this.
DO $$BEGIN
    IF EXISTS (
        SELECT FROM pg_namespace AS n
        LEFT JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname IN ('flush', 'provisioned')
        JOIN pg_roles AS r ON r.oid IN (n.nspowner, c.relowner)
        WHERE n.nspname = 'tuskline' AND NOT r.rolsuper AND r.rolname <> session_user)
    THEN
        RAISE EXCEPTION 'the schema tuskline, or a table in it, belongs to another role';
    END IF;
END$$;

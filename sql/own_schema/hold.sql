-- Nobody renames or drops the schema until the transaction ends. A superuser may lock rows of the catalog.
SELECT FROM pg_namespace WHERE nspname = 'tuskline' FOR UPDATE;

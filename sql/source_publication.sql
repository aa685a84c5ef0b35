-- A publication as one JSON object: which columns there are depends on the server's version.
SELECT to_jsonb(p) FROM pg_publication p WHERE p.pubname = %(publication)s;

-- What the publication with this OID is called now. No row: it is gone.
SELECT pubname FROM pg_publication WHERE oid = %(oid)s;

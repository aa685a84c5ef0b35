-- Rows that a policy hides would be missing in the lake; the copy reads all of them or fails.
ALTER ROLE {role} BYPASSRLS;

-- Replaces inspected.sql and marked.sql where the extension is not installed.
SELECT NULL::json AS slot WHERE false

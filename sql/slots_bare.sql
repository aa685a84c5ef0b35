-- In place of slots_inspected.sql where there is no extension.
SELECT NULL::jsonb AS slot WHERE false

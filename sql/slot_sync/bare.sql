-- In place of slots_inspected.sql and slots_marked.sql where there is no extension.
SELECT NULL::json AS slot WHERE false

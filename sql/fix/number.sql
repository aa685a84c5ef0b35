ALTER SYSTEM SET {name} = {value};
-- {name} takes effect when the server is restarted.

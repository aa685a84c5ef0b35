ALTER SYSTEM SET {name} = {value};

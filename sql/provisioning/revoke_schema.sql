REVOKE {privilege} ON SCHEMA {name} FROM {role};

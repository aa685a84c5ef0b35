REVOKE {privilege} ON DATABASE {name} FROM {role};

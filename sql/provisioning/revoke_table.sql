REVOKE {privilege} ON TABLE {name} FROM {role};

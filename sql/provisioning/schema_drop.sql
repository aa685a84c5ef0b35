-- Without CASCADE: what somebody else has put there is theirs to remove.
DROP SCHEMA tuskline;

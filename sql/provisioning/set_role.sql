-- Until the transaction ends.
SET LOCAL ROLE {role};

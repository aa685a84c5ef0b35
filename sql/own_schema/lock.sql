-- Nobody changes these tables' definitions until the transaction ends; their rows may change.
LOCK TABLE ONLY {tables} IN SHARE UPDATE EXCLUSIVE MODE;

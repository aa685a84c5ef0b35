-- Begins a transaction that reads a snapshot.
SET TRANSACTION SNAPSHOT {snapshot};

"""WAL on a quorum of safekeepers: protocol, proposer, safekeeper, WAL server, failover."""

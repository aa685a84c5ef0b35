"""The WAL proposer: it attaches to a primary and has its WAL committed by a quorum of safekeepers."""

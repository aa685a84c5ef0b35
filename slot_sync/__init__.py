"""Logical slots kept on every failover candidate, and proven ready there."""

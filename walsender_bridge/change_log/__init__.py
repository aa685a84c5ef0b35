"""The durable, ordered log of committed transactions: entries, replicas, repository, client."""

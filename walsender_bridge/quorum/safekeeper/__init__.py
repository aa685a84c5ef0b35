"""A safekeeper: one member of the WAL quorum."""

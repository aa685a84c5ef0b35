"""A safekeeper's WAL on disk."""

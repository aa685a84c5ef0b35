"""Complete segments in an archive."""

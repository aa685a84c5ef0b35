"""One row a key from many changes; pure."""

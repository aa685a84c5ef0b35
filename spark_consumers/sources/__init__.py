"""The two sources for Spark: `format("tuskline")` and the one of whole snapshots."""

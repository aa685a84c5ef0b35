"""The lake: tables, and the chain of manifests that says which of their snapshots make one epoch."""

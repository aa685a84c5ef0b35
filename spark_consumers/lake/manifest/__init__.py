"""The chain of manifests, and who may add to it."""

"""The metadata repository: its core, its store, its service."""

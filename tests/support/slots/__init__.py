"""A model of one slot on a primary and its copy on a standby, written without the resolver."""

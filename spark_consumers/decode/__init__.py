"""Entries of the change log as columns: from bytes to Arrow, on executors."""

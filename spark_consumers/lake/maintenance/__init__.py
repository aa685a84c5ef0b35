"""Maintenance of a lake in a process of its own, beside its writer, which alone changes tables."""

"""Larger data files in place of many small and half dead ones: planned, written and offered beside the writer, which decides."""

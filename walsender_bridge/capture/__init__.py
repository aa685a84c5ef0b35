"""Capture: the committed transactions of one database, exactly once and in order, into its stream."""

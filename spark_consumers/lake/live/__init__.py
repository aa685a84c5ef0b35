"""Live reads: the newest epoch, and what the log has behind it, merged when they are read."""

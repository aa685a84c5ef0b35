"""One epoch, from a range of the log to the link of a manifest."""

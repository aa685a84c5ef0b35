"""Large transactions, kept on disk while they are in progress."""

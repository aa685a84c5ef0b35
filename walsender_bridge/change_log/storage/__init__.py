"""Entries of one replica on disk, in segments."""

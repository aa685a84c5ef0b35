"""A replica of a log stream: its core, its disk, its service."""

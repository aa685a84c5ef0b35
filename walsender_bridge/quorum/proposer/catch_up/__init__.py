"""Older WAL for safekeepers that lack it, and its comparison with what they hold."""

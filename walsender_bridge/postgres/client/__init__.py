"""Connections to PostgreSQL: to a walsender, and ordinary ones on which nothing waits longer than a limit."""

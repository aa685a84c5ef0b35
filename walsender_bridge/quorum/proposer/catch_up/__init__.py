"""Catch-up: sending older WAL to safekeepers whose log begins later; and comparing the primary's WAL with theirs."""

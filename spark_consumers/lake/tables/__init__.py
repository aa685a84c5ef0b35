"""The states of tables, and what changes about them at the source; decisions are pure."""

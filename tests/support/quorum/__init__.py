"""A model of safekeepers, proposers and PostgreSQL servers around the real cores, and its invariants."""

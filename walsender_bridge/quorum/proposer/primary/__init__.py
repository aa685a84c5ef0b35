"""The primary as a proposer sees it: its facts, its stream, its shutdown."""

"""The commit gate: what is shown to consumers only after every candidate has it."""

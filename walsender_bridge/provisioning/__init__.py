"""Attaching to a server and letting go of it: `init` makes what a source needs, `detach` takes it back."""

"""Provisioning of a server: `init` creates the objects that a source needs, `detach` removes them."""

"""The command line's groups: one module for each, registered in `app`."""

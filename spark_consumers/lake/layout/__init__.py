"""How the rows of a table are laid out in data files: partitions, their values, and the order of rows. Pure."""

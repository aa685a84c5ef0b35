"""Where each row of a table is: its data file and its position, found by the row's key."""

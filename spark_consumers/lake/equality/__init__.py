"""The proof of equality (`tuskline verify`): a source and its lake compared at one exact cut."""

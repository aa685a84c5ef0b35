"""What differs between a table at its source and in the lake: chunks of rows, compared by the sums of their digests."""

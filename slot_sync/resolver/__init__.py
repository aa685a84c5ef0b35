"""What becomes of each copy of a logical slot: a pure decision from what two servers show and what we remember."""

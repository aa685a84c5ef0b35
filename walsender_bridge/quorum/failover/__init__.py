"""A failover without loss: its steps, and what carries them out."""

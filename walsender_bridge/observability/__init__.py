"""What a running Tuskline shows of itself: one observation, for status, top and /metrics."""

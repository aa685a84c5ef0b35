"""What Tuskline's figures are and how they are measured: each a ratio against a real peer, in one run.

Own part and peer take turns (A B A B ...), at least five times; a figure is the median. CPU seconds stand
beside wall seconds. A ratio is printed only if both produced the same result from the same input. Every round is kept.
"""

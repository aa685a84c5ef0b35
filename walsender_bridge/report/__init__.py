"""A report: what an installation did over some time, as one HTML page that needs nothing else."""

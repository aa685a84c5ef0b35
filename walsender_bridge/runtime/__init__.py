"""What every process needs whatever it is for: durable files, logs, clocks, child processes."""

"""Services shared by all processes: durable files, logs, clocks, child processes."""

"""What on a server or on this machine is not ready, and the SQL that repairs it."""

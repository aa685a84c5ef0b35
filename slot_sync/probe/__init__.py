"""What a primary and its standbys say of their slots, asked on connections that wait for nobody for long."""

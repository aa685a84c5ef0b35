"""What Tuskline knows of PostgreSQL, and nothing of Tuskline itself."""

"""`tuskline demo`: a bank on a real PostgreSQL, the whole pipeline, and the proof that the lake is equal."""

-- Raises unless the token's transaction has committed here.
SELECT tuskline.committed(%(token)s);

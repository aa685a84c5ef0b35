-- A look must not wait: what hangs is as good as not there.
SET statement_timeout = '3s';

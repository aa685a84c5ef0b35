-- Creates a copy under a temporary name; returns the catalog_xmin that it holds.
SELECT tuskline_slots.reserve(%(name)s, %(plugin)s, %(restart_lsn)s, %(confirmed_flush_lsn)s, %(two_phase)s,
                              %(two_phase_at)s);

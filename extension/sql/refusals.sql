-- On a server that is not in recovery there is nothing to copy to.
SELECT tuskline_slots.reserve('_tuskline_tmp_a', 'pgoutput', '0/1', '0/1');
SELECT tuskline_slots.set_fields('a', '0/1', '0/1', '3');
SELECT tuskline_slots.rename('_tuskline_tmp_a', 'a');
SELECT tuskline_slots.drop('a');
SELECT tuskline_slots.drop('_tuskline_tmp_a');
-- A value that is needed, and one that cannot be right.
SELECT tuskline_slots.drop(NULL);
SELECT tuskline_slots.mark(NULL, 'x');
SELECT tuskline_slots.mark('regress_tuskline_none', 'x');
SELECT tuskline_slots.inspect('regress_tuskline_none');
SELECT * FROM tuskline_slots.inspect('regress_tuskline_none');

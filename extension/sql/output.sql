-- The output plugin sends what pgoutput does, if it has nobody to wait for.
CREATE TABLE regress_tuskline_shop (id int PRIMARY KEY, note text);
CREATE PUBLICATION regress_tuskline_pub FOR TABLE regress_tuskline_shop;
SELECT slot_name FROM pg_create_logical_replication_slot('regress_tuskline_plain', 'pgoutput');
SELECT slot_name FROM pg_create_logical_replication_slot('regress_tuskline_gated', 'tuskline');
INSERT INTO regress_tuskline_shop SELECT n, 'row ' || n FROM generate_series(1, 3) AS n;
UPDATE regress_tuskline_shop SET note = 'changed' WHERE id = 2;
DELETE FROM regress_tuskline_shop WHERE id = 3;
SELECT count(*), bool_and(p.data = g.data) AS same
FROM (SELECT row_number() OVER () AS number, data
      FROM pg_logical_slot_peek_binary_changes('regress_tuskline_plain', NULL, NULL, 'proto_version', '1',
                                               'publication_names', 'regress_tuskline_pub')) AS p
FULL JOIN (SELECT row_number() OVER () AS number, data
      FROM pg_logical_slot_peek_binary_changes('regress_tuskline_gated', NULL, NULL, 'proto_version', '1',
                                               'publication_names', 'regress_tuskline_pub')) AS g USING (number);
-- A slot that is not there is waited for: the session can be ended, and the slot gives all of it afterwards.
SET tuskline.wait_for_slots = 'regress_tuskline_none';
SET statement_timeout = '500ms';
\set SHOW_CONTEXT never
SELECT count(*) FROM pg_logical_slot_peek_binary_changes('regress_tuskline_gated', NULL, NULL, 'proto_version', '1',
                                                         'publication_names', 'regress_tuskline_pub');
RESET statement_timeout;
SET tuskline.wait_for_slots = '';
SELECT count(*) > 0 AS all_of_it
FROM pg_logical_slot_get_binary_changes('regress_tuskline_gated', NULL, NULL, 'proto_version', '1',
                                        'publication_names', 'regress_tuskline_pub');
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name LIKE 'regress%';
DROP PUBLICATION regress_tuskline_pub;
DROP TABLE regress_tuskline_shop;

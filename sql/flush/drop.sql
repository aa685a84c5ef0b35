-- What functions.sql has made. A role of another name may have been granted USAGE, which its own record has.
DROP PROCEDURE IF EXISTS tuskline.wait_sync(text, interval, text), tuskline.wait_flush(text, interval, text),
    tuskline.wait_for(text, text, interval, text);
DROP FUNCTION IF EXISTS tuskline.report_lake(text, text, integer, txid_snapshot, bigint, text, text),
    tuskline.report_driver(text, text, text, jsonb), tuskline.request_channel(), tuskline.check_source(text), tuskline.is_source(), tuskline.refused_commit(),
    tuskline.marks(), tuskline.mark(text, bigint), tuskline.milliseconds_until(timestamptz), tuskline.wait_look(text, bigint, text, timestamptz, boolean), tuskline.behind(bigint, text), tuskline.check_lake(text), tuskline.wait_begin(text),
    tuskline.committed(text), tuskline.flush_token(), tuskline.check_waiter(), tuskline.may_flush(oid), tuskline.timeline(),
    tuskline.database();
DROP TABLE IF EXISTS tuskline.lakes, tuskline.request_channel;
REVOKE USAGE ON SCHEMA tuskline FROM PUBLIC;

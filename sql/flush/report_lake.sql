SELECT tuskline.report_lake(%(lake)s, %(stream)s, %(timeline)s::int, %(visible)s::txid_snapshot, %(epoch)s::bigint,
                            %(stage)s::text, %(reason)s::text);

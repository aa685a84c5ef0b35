-- What the tables of the schema tuskline have that flush.sql does not give them. Anything of that could run code.
WITH own AS (
    SELECT c.oid, concat('tuskline.', c.relname) AS name, to_jsonb(c) AS facts
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = 'tuskline' AND c.relname IN ('flush', 'provisioned')
), expected (name, attribute, type, value) AS (
    VALUES ('tuskline.flush', 'id', 'integer', ''),
           ('tuskline.flush', 'token', 'bigint', '0'),
           ('tuskline.flush', 'at', 'timestamp with time zone', 'clock_timestamp()'),
           ('tuskline.provisioned', 'slot', 'text', ''),
           ('tuskline.provisioned', 'kind', 'text', ''),
           ('tuskline.provisioned', 'name', 'text', ''),
           ('tuskline.provisioned', 'privilege', 'text', '''''::text'),
           ('tuskline.provisioned', 'grantee', 'text', '''''::text'),
           ('tuskline.provisioned', 'at', 'timestamp with time zone', 'clock_timestamp()')
), found AS (
    SELECT o.name, a.attname::text, format_type(a.atttypid, a.atttypmod),
           coalesce(pg_get_expr(d.adbin, d.adrelid), '')
    FROM own AS o JOIN pg_attribute AS a ON a.attrelid = o.oid AND a.attnum > 0 AND NOT a.attisdropped
    LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
)
SELECT concat(o.name, ' is not an ordinary table') FROM own AS o
WHERE o.facts ->> 'relkind' <> 'r' OR o.facts ->> 'relpersistence' <> 'p'
   OR EXISTS (SELECT FROM pg_inherits AS i WHERE o.oid IN (i.inhrelid, i.inhparent))
UNION ALL
SELECT concat('trigger ', t.tgname, ' on ', o.name) FROM own AS o JOIN pg_trigger AS t ON t.tgrelid = o.oid
UNION ALL
SELECT concat('rule ', w.rulename, ' on ', o.name) FROM own AS o JOIN pg_rewrite AS w ON w.ev_class = o.oid
UNION ALL
SELECT concat('row security of ', o.name) FROM own AS o
WHERE (o.facts ->> 'relrowsecurity')::boolean OR EXISTS (SELECT FROM pg_policy AS p WHERE p.polrelid = o.oid)
UNION ALL
SELECT concat('constraint ', k.conname, ' of ', o.name) FROM own AS o JOIN pg_constraint AS k ON k.conrelid = o.oid
WHERE k.contype NOT IN ('p', 'n')
  AND NOT (o.name = 'tuskline.flush' AND k.contype = 'c' AND pg_get_constraintdef(k.oid) = 'CHECK ((id = 1))')
UNION ALL
SELECT concat('index ', x.relname, ' on ', o.name)
FROM own AS o JOIN pg_index AS i ON i.indrelid = o.oid JOIN pg_class AS x ON x.oid = i.indexrelid
WHERE NOT i.indisprimary OR i.indexprs IS NOT NULL OR i.indpred IS NOT NULL
UNION
SELECT concat('column ', coalesce(f.attname, m.attribute), ' of ', coalesce(f.name, m.name))
FROM (SELECT * FROM expected WHERE expected.name IN (SELECT own.name FROM own)) AS m
FULL JOIN found AS f ON (f.name, f.attname, f.format_type, f.coalesce) = (m.name, m.attribute, m.type, m.value)
WHERE f.name IS NULL OR m.name IS NULL
ORDER BY 1;

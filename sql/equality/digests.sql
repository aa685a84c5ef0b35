-- Rows of a part of a relation: whether the lake's types hold their values, their digests, and those of their keys. The forms are those
-- of spark_consumers/lake/comparison/forms.py. OFFSET 0 keeps the planner from computing an expression once for each of its uses.
SELECT formed.*, substr(sha256({row}), 1, 16) AS digest, {key} AS key_digest
FROM (SELECT {columns}, {held} AS is_held FROM ONLY {relation} WHERE {range} AND {filter} OFFSET 0) AS formed OFFSET 0

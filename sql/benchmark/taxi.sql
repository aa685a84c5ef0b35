-- As many rows as pgbench_accounts has, in the columns and types of the public records of New York's yellow taxis. As there, no key.
CREATE TABLE taxi AS
SELECT 1 + mod(aid, 2) AS vendor_id,
       timestamp '2024-01-01' + mod(aid * 7919::bigint, 31536000) * interval '1 second' AS pickup_at,
       timestamp '2024-01-01' + (mod(aid * 7919::bigint, 31536000) + 120 + mod(aid * 31, 3600)) * interval '1 second' AS dropoff_at,
       CASE WHEN mod(aid, 50) = 0 THEN NULL ELSE (1 + mod(aid, 6))::double precision END AS passenger_count,
       mod(aid * 17::bigint, 3000) / 100.0::double precision AS trip_distance,
       CASE WHEN mod(aid, 50) = 0 THEN NULL ELSE (1 + mod(aid, 5))::double precision END AS rate_code_id,
       CASE WHEN mod(aid, 50) = 0 THEN NULL WHEN mod(aid, 100) = 1 THEN 'Y' ELSE 'N' END AS store_and_forward,
       1 + mod(aid * 13::bigint, 265) AS pickup_location_id,
       1 + mod(aid * 11::bigint, 265) AS dropoff_location_id,
       1 + mod(aid, 4)::bigint AS payment_type,
       3 + mod(aid * 17::bigint, 9000) / 100.0::double precision AS fare_amount,
       mod(aid, 3) / 2.0::double precision AS extra,
       0.5::double precision AS mta_tax,
       mod(aid * 19::bigint, 1500) / 100.0::double precision AS tip_amount,
       CASE WHEN mod(aid, 20) = 0 THEN 6.94 ELSE 0 END::double precision AS tolls_amount,
       1.0::double precision AS improvement_surcharge,
       5 + mod(aid * 23::bigint, 12000) / 100.0::double precision AS total_amount,
       CASE WHEN mod(aid, 50) = 0 THEN NULL ELSE 2.5 END::double precision AS congestion_surcharge,
       CASE WHEN mod(aid, 30) = 0 THEN 1.75 ELSE 0 END::double precision AS airport_fee
FROM pgbench_accounts;

-- Whether this session may act as the owner of the schema's tables.
SELECT pg_has_role(%(role)s, 'MEMBER');

-- The rules by which the server lets clients in, in their order, and the address that this session comes from. For
-- superusers and those whom they let read it.
SELECT r.line_number, r.type, r.database, r.user_name, r.address, r.netmask, r.auth_method, r.error,
       inet_client_addr()::text
FROM pg_hba_file_rules AS r ORDER BY r.line_number;

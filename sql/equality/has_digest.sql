-- Whether a row has one of these digests (in hexadecimal), which are those of digests.sql.
encode(substr(sha256({row}), 1, 16), 'hex') = ANY ({wanted}::text[])

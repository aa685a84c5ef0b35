-- Rows with one of these digests: the forms of their columns, and their texts.
SELECT digest, {forms}, {texts} FROM ({digests}) AS digested WHERE is_held AND digest = ANY ({wanted}::bytea[]);

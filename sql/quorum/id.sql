-- The recorded id of the quorum that stores this server's WAL.
SELECT name FROM tuskline.provisioned WHERE kind = 'quorum';

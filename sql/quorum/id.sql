-- The id of the quorum that this server's commits are on.
SELECT name FROM tuskline.provisioned WHERE kind = 'quorum';

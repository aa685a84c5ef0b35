-- Remove the recorded quorum id, so that the next quorum to be formed is recorded instead.
DELETE FROM tuskline.provisioned WHERE kind = 'quorum';

-- No quorum is recorded any more: the next one that is formed will be.
DELETE FROM tuskline.provisioned WHERE kind = 'quorum';

-- How much other sources of this database have made: what all of them use stays while there is any.
SELECT count(*) FROM tuskline.provisioned WHERE slot NOT IN ('', %(slot)s);

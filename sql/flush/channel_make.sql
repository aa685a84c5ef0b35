-- It keeps its name until `tuskline detach`, so that drivers need not be started again after another `init`.
INSERT INTO tuskline.request_channel (name) SELECT %(name)s WHERE NOT EXISTS (SELECT FROM tuskline.request_channel);

COMMENT ON PUBLICATION {publication} IS 'Belongs to Tuskline; see tuskline.made. It adds the tables that the configuration means.';

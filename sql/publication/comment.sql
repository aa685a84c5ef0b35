COMMENT ON PUBLICATION {publication} IS 'Belongs to Tuskline; see tuskline.provisioned. It adds the tables that the configuration means.';

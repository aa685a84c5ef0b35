"""The schema `tuskline` on a server: the record of provisioned objects, and its ownership."""

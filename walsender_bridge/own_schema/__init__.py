"""The schema `tuskline` on a server: what Tuskline has made there, and whose it is."""

"""What says which metadata a table has, and the names of tables for engines that know no manifests."""

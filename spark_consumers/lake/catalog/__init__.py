"""Names of the lake's tables for engines that know no manifests."""

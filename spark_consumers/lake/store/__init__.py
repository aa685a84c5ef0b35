"""Where a lake's own records are: in a folder on a disk, or in a bucket of an object store."""

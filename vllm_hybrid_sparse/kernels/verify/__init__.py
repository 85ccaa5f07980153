"""Judge after a microbatch whether enough has been read."""

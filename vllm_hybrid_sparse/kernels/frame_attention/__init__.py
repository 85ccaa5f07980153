"""Exact attention of decode rows to their whole contexts, which lie in frames on the device."""

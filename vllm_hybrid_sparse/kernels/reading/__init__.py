"""How many pages of its order a group reads: planned by estimates, then by what was read (PSA, section 3.2)."""

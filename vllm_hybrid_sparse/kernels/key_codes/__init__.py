"""Key codes: a few bits of every key, from which its attention score is estimated without bias."""

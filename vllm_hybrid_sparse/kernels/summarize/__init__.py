"""Keep of each page what estimates its score."""

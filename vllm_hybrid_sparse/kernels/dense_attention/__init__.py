"""Attention of many rows to contiguous tokens, with the log-sum-exp that lets results be merged."""

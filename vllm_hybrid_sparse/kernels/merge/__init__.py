"""Fold partial attentions into one."""

"""Estimate what a query gives to a page from the summary of the page."""

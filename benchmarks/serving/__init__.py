"""Both backends through the HTTP server, in turns."""

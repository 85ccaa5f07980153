"""PSA: attend page by page until enough weight is gathered."""

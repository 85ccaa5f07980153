"""How the device pool and the loader do on real traces."""

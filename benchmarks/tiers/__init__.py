"""What the device pool and the loader do with real traces."""

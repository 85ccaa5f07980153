"""Move pages between the host store and slots of the device pool."""

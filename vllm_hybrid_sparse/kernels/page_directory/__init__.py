"""Which page lies in which slot, kept on the device and by the device alone."""

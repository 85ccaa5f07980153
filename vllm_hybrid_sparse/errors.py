"""The errors that a user or a caller can cause."""


class HybridSparseError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(HybridSparseError, ValueError):
    """A setting, a model or an option that cannot be served; the text reads ``name=value: rule``."""


class CapacityError(HybridSparseError, RuntimeError):
    """A fixed store (slots, pages, workspace) is too small for what was asked of it."""


class KernelError(HybridSparseError, RuntimeError):
    """A kernel was called with a shape, dtype, stride or instruction set that it does not serve."""


class LoadError(HybridSparseError, RuntimeError):
    """Pages could not be brought from the host store to the device."""

"""AsymLoop, the asymmetric looped transformer, for Hugging Face Transformers."""

from . import auto  # noqa: F401
from .modeling import *  # noqa: F403
from .modeling import __all__  # noqa: F401

__version__ = "0.1.0"

"""kvbridge: carries a request's KV cache from one vendor's accelerator to another's."""

__version__ = "0.1.0"

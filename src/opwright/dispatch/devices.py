"""The devices that kernels run on, with the dispatcher's keys. A wheel has a table in place of this file."""

from opwright.backends.registry import dispatch_keys

DISPATCH_KEYS = dispatch_keys()

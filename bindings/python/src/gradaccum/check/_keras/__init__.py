# SPDX-License-Identifier: Apache-2.0
"""Loops of Keras 3, on each of its backends."""

from ._hooks import watch, watch_library

__all__ = ["watch", "watch_library"]

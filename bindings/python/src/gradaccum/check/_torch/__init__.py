# SPDX-License-Identifier: Apache-2.0
"""Loops of torch."""

from ._recorder import Recorder

__all__ = ["Recorder"]

# SPDX-License-Identifier: Apache-2.0
# What SWIG generates has no types. Only this package imports it.
from typing import Any

def __getattr__(name: str) -> Any: ...

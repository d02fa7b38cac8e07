# SPDX-License-Identifier: Apache-2.0
# The functions of _raw, without a call of Python's between.
from ._raw import __getattr__ as __getattr__

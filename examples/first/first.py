# first.c in Python: see there.
# SPDX-License-Identifier: Apache-2.0
import gradaccum as ga
import numpy as np

samples = np.arange(71)[:, None]
x = (samples * np.arange(2, 5) % 7 / 4).astype(np.float32)
y = (samples[:, 0] % 5).astype(np.float32)
w = np.ones(3, np.float32)


def backward(x, y):
    return (2 * (x @ w - y) @ x / len(x)).astype(np.float32)


batch = w - 0.1 * backward(x, y)

# begin
with ga.Context() as context:
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=0.1))
    context.add_param(group, "w", w)
    for first in range(0, 71, 32):  # 32, 32 and 7 samples
        xs, ys = x[first : first + 32], y[first : first + 32]
        dw = backward(xs, ys)  # your code: a mean over the micro-batch
        context.accumulate([dw], weight=len(xs))
    context.step()  # updates w as one batch of 71 would
# end

print("w =", *(f"{element:.6f}" for element in w))
assert np.abs(w - batch).max() <= 1e-6

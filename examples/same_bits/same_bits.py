# SPDX-License-Identifier: Apache-2.0
"""same_bits.c in Python: see there. Arrays of numpy, whose every element is summed in the same order.

usage: same_bits.py <folder of Fashion-MNIST> <file>
"""

import gzip
import sys
from pathlib import Path

import gradaccum as ga
import numpy as np

IMAGES, PIXELS, HIDDEN, CLASSES, WINDOW, MICRO, EPOCHS = 500, 784, 32, 10, 64, 16, 3


class Layer:
    """A parameter and its gradient, which is the mean of sums in double."""

    def __init__(self, *shape: int) -> None:
        self.values = np.zeros(shape, np.float32)
        self.gradient = np.zeros(shape, np.float32)
        self.sums = np.zeros(shape)

    def fill(self, scale: float, state: int) -> int:
        """Uniform in [-scale / 2, scale / 2), in steps that a float holds."""
        flat = self.values.reshape(-1)
        for i in range(flat.size):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            flat[i] = ((state >> 40) / 16777216 - 0.5) * scale
        return state


def read(path: Path, header: int, *shape: int) -> np.ndarray:
    with gzip.open(path) as file:
        file.read(header)
        return np.frombuffer(file.read(int(np.prod(shape))), np.uint8).reshape(shape)


class Network:
    def __init__(self, folder: Path) -> None:
        self.pixels = read(folder / "train-images-idx3-ubyte.gz", 16, IMAGES, PIXELS) / 256.0
        self.labels = read(folder / "train-labels-idx1-ubyte.gz", 8, IMAGES)
        self.w1, self.b1 = Layer(HIDDEN, PIXELS), Layer(HIDDEN)
        self.w2, self.b2 = Layer(CLASSES, HIDDEN), Layer(CLASSES)
        self.layers = [self.w1, self.b1, self.w2, self.b2]
        self.w2.fill(0.5, self.w1.fill(0.125, 1))

    def backward(self, first: int, end: int) -> float:
        """Stores the mean gradients of samples [first, end), and returns the sum of their losses."""
        x = self.pixels[first:end]
        w1, b1, w2, b2 = (layer.values.astype(np.float64) for layer in self.layers)
        h = np.tile(b1, (end - first, 1))
        for p in range(PIXELS):  # not a matrix product, which would choose an order of its own
            h += w1[:, p] * x[:, p, None]
        h[h < 0] = 0
        error = np.tile(b2, (end - first, 1))
        for j in range(HIDDEN):
            error += w2[:, j] * h[:, j, None]
        error[np.arange(end - first), self.labels[first:end]] -= 1
        dh = np.zeros_like(h)
        for c in range(CLASSES):
            dh += 2 * error[:, c, None] * w2[c]
        dh[h <= 0] = 0
        for layer in self.layers:
            layer.sums[:] = 0
        loss = 0.0
        for i in range(end - first):
            for one in error[i]:
                loss += float(one * one)
            self.b2.sums += 2 * error[i]
            self.w2.sums += (2 * error[i])[:, None] * h[i]
            self.b1.sums += dh[i]
            self.w1.sums += dh[i][:, None] * x[i]
        for layer in self.layers:
            layer.gradient[:] = layer.sums / (end - first)
        return loss

    def train(self) -> None:
        with ga.Context() as context:
            group = context.add_group(ga.Optimizer(ga.OptimizerKind.ADAMW, lr=1 / 512))
            context.set_clip(ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=1))
            for name, layer in zip(
                ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"), self.layers, strict=True
            ):
                context.add_param(group, name, layer.values)
            for epoch in range(1, EPOCHS + 1):
                loss = 0.0
                for window in range(0, IMAGES, WINDOW):
                    end = min(window + WINDOW, IMAGES)
                    for first in range(window, end, MICRO):
                        last = min(first + MICRO, end)
                        loss += self.backward(first, last)
                        context.accumulate([layer.gradient for layer in self.layers], weight=last - first)
                    context.step()
                print(f"epoch {epoch}: loss {loss / IMAGES:.4f}")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: same_bits.py <folder of Fashion-MNIST> <file>")
    network = Network(Path(sys.argv[1]))
    network.train()
    Path(sys.argv[2]).write_bytes(b"".join(layer.values.tobytes() for layer in network.layers))


if __name__ == "__main__":
    main()

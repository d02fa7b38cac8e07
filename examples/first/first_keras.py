# first.c with Keras: see there.
# SPDX-License-Identifier: Apache-2.0
import gradaccum.keras
import keras
import numpy as np

samples = np.arange(71)[:, None]
x = (samples * np.arange(2, 5) % 7 / 4).astype(np.float32)
y = (samples % 5).astype(np.float32)
batch = 1 - 0.1 * 2 * (x.sum(1) - y[:, 0]) @ x / 71

# begin
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
model = gradaccum.keras.wrap(model, accum_steps=3)
model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(x, y, batch_size=32)  # 32, 32 and 7 samples: updates model as one batch of 71 would
# end

w = np.ravel(model.get_weights()[0])
print("w =", *(f"{element:.6f}" for element in w))
assert np.abs(w - batch).max() <= 1e-6

# first.c with torch: see there.
# SPDX-License-Identifier: Apache-2.0
import gradaccum.torch
import torch

samples = torch.arange(71)[:, None]
x = samples * torch.arange(2, 5) % 7 / 4
y = samples % 5 * 1.0
net = torch.nn.Linear(3, 1, bias=False)
torch.nn.init.ones_(net.weight)
net(x).sub(y).square().mean().backward()
batch = (net.weight - 0.1 * net.weight.grad).detach()
net.weight.grad = None

# begin
optimizer = gradaccum.torch.SGD(net.parameters(), lr=0.1)
for xs, ys in zip(x.split(32), y.split(32)):  # 32, 32 and 7 samples
    loss = torch.nn.functional.mse_loss(net(xs), ys)  # your code: a mean over the micro-batch
    optimizer.backward(loss, weight=len(xs))
optimizer.step()  # updates net as one batch of 71 would
# end

print("w =", *(f"{element:.6f}" for element in net.weight.flatten().tolist()))
assert (net.weight - batch).abs().max() <= 1e-6

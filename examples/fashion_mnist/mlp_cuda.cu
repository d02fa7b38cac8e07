// The network in a GPU's memory, with cuBLAS's matrix products, on the default stream. libgradaccum
// gets the gradients' device addresses; only the score comes back to the CPU, once per window.
// SPDX-License-Identifier: Apache-2.0
#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "halves.hpp"
#include "mlp.hpp"
#include "numbers.hpp"

namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

void check(cublasStatus_t status) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw std::runtime_error(std::string("cuBLAS: ") + cublasGetStatusString(status));
  }
}

// ---- Memory ---------------------------------------------------------------------------------------

// Memory of the GPU, zeroed.
template <typename T>
class Array {
 public:
  explicit Array(std::int64_t count = 0) : count_(count) {
    if (count == 0) return;
    T* data = nullptr;
    check(cudaMalloc(&data, bytes()));
    data_.reset(data);
    check(cudaMemset(data, 0, bytes()));
  }

  T* get() const { return data_.get(); }
  std::int64_t count() const { return count_; }
  std::size_t bytes() const { return static_cast<std::size_t>(count_) * sizeof(T); }

  void read(void* to) const { check(cudaMemcpy(to, get(), bytes(), cudaMemcpyDeviceToHost)); }
  void write(const void* from) { check(cudaMemcpy(get(), from, bytes(), cudaMemcpyHostToDevice)); }

 private:
  struct Free {
    void operator()(T* data) const { cudaFree(data); }
  };
  std::int64_t count_;
  std::unique_ptr<T, Free> data_;
};

// Page-locked memory of the CPU, which the GPU can copy from asynchronously.
template <typename T>
class Pinned {
 public:
  explicit Pinned(std::int64_t count) {
    T* data = nullptr;
    check(cudaMallocHost(&data, static_cast<std::size_t>(count) * sizeof(T)));
    data_.reset(data);
  }
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* data) const { cudaFreeHost(data); }
  };
  std::unique_ptr<T, Free> data_;
};

// ---- Kernels --------------------------------------------------------------------------------------

#ifdef __CUDACC__
template <typename Kernel>
__global__ void run(std::int64_t count, Kernel kernel) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) kernel(i);
}
#endif

// Queues kernel(i) for each i in [0, count), one thread per i.
template <typename Kernel>
void each(std::int64_t count, const Kernel& kernel) {
  if (count == 0) return;
#ifdef __CUDACC__
  run<<<static_cast<unsigned>((count + 255) / 256), 256>>>(count, kernel);
  check(cudaGetLastError());
#else  // the simulated device of the tests
  check(ga::sim::launch_grid(
      typeid(Kernel), sizeof(Kernel), 1,
      [count, kernel] {
        for (std::int64_t i = 0; i < count; ++i) kernel(i);
      },
      nullptr));
#endif
}

struct AddBias {
  float* y;  // rows of width
  const float* bias;
  std::int64_t width;
  bool relu;
  __device__ void operator()(std::int64_t i) const {
    const float sum = y[i] + bias[i % width];
    y[i] = relu && !(sum > 0) ? 0.0F : sum;
  }
};

// Multiplies by the derivative of ReLU, which is known from ReLU's output.
struct Mask {
  const float* activations;
  float* gradients;
  __device__ void operator()(std::int64_t i) const {
    if (!(activations[i] > 0)) gradients[i] = 0.0F;
  }
};

struct SumRows {
  const float* matrix;
  std::int64_t rows, columns;
  float* out;
  __device__ void operator()(std::int64_t column) const {
    float sum = 0;
    for (std::int64_t row = 0; row < rows; ++row) sum += matrix[row * columns + column];
    out[column] = sum;
  }
};

// The score of all samples with the same index in their micro-batches.
struct Sums {
  double loss;
  std::int64_t correct;
};

// Softmax and cross-entropy of sample i.
struct CrossEntropy {
  const float* logits;
  const std::uint8_t* labels;
  std::int64_t classes;
  double scale;             // of the gradient
  const float* loss_scale;  // another factor of the gradient, on the GPU; may be NULL
  float* gradients;
  Sums* sums;
  __device__ void operator()(std::int64_t i) const {
    const float* const z = logits + i * classes;
    std::int64_t largest = 0;
    for (std::int64_t c = 1; c < classes; ++c) largest = z[c] > z[largest] ? c : largest;
    double sum = 0;
    for (std::int64_t c = 0; c < classes; ++c) sum += std::exp(double{z[c]} - z[largest]);
    const double factor = loss_scale ? scale * *loss_scale : scale;
    for (std::int64_t c = 0; c < classes; ++c) {
      const double probability = std::exp(double{z[c]} - z[largest]) / sum;
      gradients[i * classes + c] =
          static_cast<float>(factor * (probability - (c == labels[i] ? 1 : 0)));
    }
    sums[i].loss += std::log(sum) + z[largest] - z[labels[i]];
    sums[i].correct += largest == labels[i];
  }
};

struct Round {
  const float* in;
  ga_dtype dtype;
  void* out;
  __device__ void operator()(std::int64_t i) const {
    if (dtype == GA_F64) static_cast<double*>(out)[i] = in[i];
    if (dtype == GA_F16) static_cast<std::uint16_t*>(out)[i] = to_f16(in[i]);
    if (dtype == GA_BF16) static_cast<std::uint16_t*>(out)[i] = to_bf16(in[i]);
  }
};

struct Widen {
  const void* in;
  ga_dtype dtype;
  float* out;
  __device__ void operator()(std::int64_t i) const {
    if (dtype == GA_F64) out[i] = static_cast<float>(static_cast<const double*>(in)[i]);
    if (dtype == GA_F16) out[i] = from_f16(static_cast<const std::uint16_t*>(in)[i]);
    if (dtype == GA_BF16) out[i] = from_bf16(static_cast<const std::uint16_t*>(in)[i]);
  }
};

// ---- The network ----------------------------------------------------------------------------------

class CudaMlp : public Mlp {
 public:
  CudaMlp(const Start& start, std::int64_t max_samples, const Precision& precision);

  void add_to(gradaccum::Context& context, gradaccum::Group weights,
              gradaccum::Group biases) override;
  float* input() override { return slot().pixels.get(); }
  void forward(std::int64_t samples, const std::uint8_t* labels,
               const gradaccum::Context* context) override;
  void backward(std::int64_t samples, gradaccum::MicroBatch& micro) override;
  Score take_score() override;
  void read_parameters() override;
  Values parameters() override;
  Values averages(gradaccum::Context& context) override;
  void exchange(Values& values) override;
  std::int64_t parameter_bytes() const override;
  std::int64_t activation_bytes() const override;

 private:
  struct Tensor {
    explicit Tensor(std::int64_t count) : values(count) {}
    Array<float> values;      // what the network computes with
    Array<std::byte> stored;  // what the library updates; empty if it updates values itself
    gradaccum::Param id = gradaccum::no_param;
  };
  struct Layer {
    std::string name;
    std::int64_t in, out;
    Tensor weight, bias;  // [out, in], [out]
  };
  // A micro-batch's samples on their way to the GPU. There are several slots, so that the CPU
  // prepares the next samples while the GPU works.
  struct Slot {
    Slot(std::int64_t samples, std::int64_t width) : pixels(samples * width), labels(samples) {
      check(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming));
    }
    Slot(Slot&& other) noexcept
        : pixels(std::move(other.pixels)),
          labels(std::move(other.labels)),
          copied(std::exchange(other.copied, nullptr)) {}
    ~Slot() {
      if (copied) cudaEventDestroy(copied);
    }
    Pinned<float> pixels;
    Pinned<std::uint8_t> labels;
    cudaEvent_t copied = nullptr;
  };
  struct DestroyCublas {
    void operator()(cublasHandle_t handle) const { cublasDestroy(handle); }
  };

  Slot& slot() { return slots_[next_slot_]; }
  template <typename Do>
  void each_tensor(Do what) {
    for (Layer& layer : layers_) {
      what(layer.weight);
      what(layer.bias);
    }
  }
  void multiply(cublasOperation_t op_a, cublasOperation_t op_b, std::int64_t m, std::int64_t n,
                std::int64_t k, const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
                float* c);
  void contribute_weight(std::size_t layer, std::int64_t samples, gradaccum::MicroBatch& micro);
  const void* as_gradients(const float* values, std::int64_t count,
                           const Array<std::byte>& buffer) const;

  const Precision precision_;
  std::vector<Layer> layers_;
  std::vector<Slot> slots_;
  std::size_t next_slot_ = 0;
  Array<std::uint8_t> labels_;
  std::vector<Array<float>> activations_;  // the input of each layer, then the logits
  std::vector<Array<float>> gradients_;    // of activations_; the first is empty
  Array<float> bias_gradient_, weight_gradient_;
  // In the gradients' dtype: the two factors of a weight's product, and any gradient. Empty for
  // f32.
  Array<std::byte> rounded_dy_, rounded_x_, rounded_gradient_;
  Array<Sums> sums_;
  std::unique_ptr<std::remove_pointer_t<cublasHandle_t>, DestroyCublas> cublas_;
};

CudaMlp::CudaMlp(const Start& start, std::int64_t max_samples, const Precision& precision)
    : precision_(precision), labels_(max_samples), sums_(max_samples) {
  std::int64_t widest = start.front().in, largest = 0;  // input or output, weight
  activations_.emplace_back(max_samples * widest);
  gradients_.emplace_back();
  for (int i = 0; i < 4; ++i) slots_.emplace_back(max_samples, widest);
  for (const LayerStart& from : start) {
    activations_.emplace_back(max_samples * from.out);
    gradients_.emplace_back(max_samples * from.out);
    widest = std::max(widest, from.out);
    largest = std::max(largest, from.in * from.out);
    layers_.push_back({from.name, from.in, from.out, Tensor(from.in * from.out), Tensor(from.out)});
    layers_.back().weight.values.write(from.weight.data());
  }
  const bool stores = !precision.allows_matmul();
  bias_gradient_ = Array<float>(widest);
  if (stores) weight_gradient_ = Array<float>(largest);
  if (precision.gradients != GA_F32) {
    const auto bytes = static_cast<std::int64_t>(bytes_of(precision.gradients));
    rounded_dy_ = Array<std::byte>(max_samples * widest * bytes);
    rounded_x_ = Array<std::byte>(max_samples * widest * bytes);
    rounded_gradient_ = Array<std::byte>((stores ? largest : widest) * bytes);
  }
  cublasHandle_t handle = nullptr;
  check(cublasCreate(&handle));
  cublas_.reset(handle);
}

void CudaMlp::add_to(gradaccum::Context& context, gradaccum::Group weights,
                     gradaccum::Group biases) {
  ga_param_options options = gradaccum::default_param_options();
  options.gradient_dtype = precision_.gradients;
  options.accumulator_dtype = precision_.accumulators;
  const auto add = [&](gradaccum::Group group, const std::string& name, Tensor& tensor,
                       const std::vector<std::int64_t>& shape) {
    void* data = tensor.values.get();
    if (precision_.parameters != GA_F32) {
      const auto bytes = static_cast<std::int64_t>(bytes_of(precision_.parameters));
      tensor.stored = Array<std::byte>(tensor.values.count() * bytes);
      data = tensor.stored.get();
      each(tensor.values.count(), Round{tensor.values.get(), precision_.parameters, data});
    }
    tensor.id = context.add_param(group, name, data, precision_.parameters, shape, &options);
  };
  for (Layer& layer : layers_) {
    add(weights, layer.name + ".weight", layer.weight, {layer.out, layer.in});
    add(biases, layer.name + ".bias", layer.bias, {layer.out});
  }
  read_parameters();
}

// c = op(a) op(b) for column-major matrices, which cuBLAS expects: the transposes of row-major
// ones. The product is in full f32, not TF32.
void CudaMlp::multiply(cublasOperation_t op_a, cublasOperation_t op_b, std::int64_t m,
                       std::int64_t n, std::int64_t k, const float* a, std::int64_t lda,
                       const float* b, std::int64_t ldb, float* c) {
  const float one = 1, zero = 0;
  const auto number = [](std::int64_t x) { return static_cast<int>(x); };
  check(cublasSgemm(cublas_.get(), op_a, op_b, number(m), number(n), number(k), &one, a,
                    number(lda), b, number(ldb), &zero, c, number(m)));
}

void CudaMlp::forward(std::int64_t samples, const std::uint8_t* labels,
                      const gradaccum::Context* context) {
  Slot& from = slot();
  std::copy_n(labels, samples, from.labels.get());
  const std::int64_t width = layers_.front().in;
  check(cudaMemcpyAsync(activations_.front().get(), from.pixels.get(),
                        static_cast<std::size_t>(samples * width) * sizeof(float),
                        cudaMemcpyHostToDevice));
  check(cudaMemcpyAsync(labels_.get(), from.labels.get(), static_cast<std::size_t>(samples),
                        cudaMemcpyHostToDevice));
  check(cudaEventRecord(from.copied));
  next_slot_ = (next_slot_ + 1) % slots_.size();
  check(cudaEventSynchronize(slot().copied));

  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    float* const y = activations_[i + 1].get();
    multiply(CUBLAS_OP_T, CUBLAS_OP_N, layer.out, samples, layer.in, layer.weight.values.get(),
             layer.in, activations_[i].get(), layer.in, y);
    each(samples * layer.out,
         AddBias{y, layer.bias.values.get(), layer.out, i + 1 < layers_.size()});
  }
  const float* const loss_scale = context ? context->device_loss_scale() : nullptr;
  each(samples, CrossEntropy{activations_.back().get(), labels_.get(), layers_.back().out,
                             1.0 / static_cast<double>(samples), loss_scale,
                             gradients_.back().get(), sums_.get()});
}

void CudaMlp::backward(std::int64_t samples, gradaccum::MicroBatch& micro) {
  for (std::size_t i = layers_.size(); i-- > 0;) {
    const Layer& layer = layers_[i];
    const float* const dy = gradients_[i + 1].get();
    contribute_weight(i, samples, micro);
    each(layer.out, SumRows{dy, samples, layer.out, bias_gradient_.get()});
    micro.accumulate_part(layer.bias.id,
                          as_gradients(bias_gradient_.get(), layer.out, rounded_gradient_));
    if (i == 0) break;
    float* const dx = gradients_[i].get();
    multiply(CUBLAS_OP_N, CUBLAS_OP_N, layer.in, samples, layer.out, layer.weight.values.get(),
             layer.in, dy, layer.out, dx);
    each(samples * layer.in, Mask{activations_[i].get(), dx});
  }
}

// dy^T x
void CudaMlp::contribute_weight(std::size_t i, std::int64_t samples, gradaccum::MicroBatch& micro) {
  const Layer& layer = layers_[i];
  const float* const dy = gradients_[i + 1].get();
  const float* const x = activations_[i].get();
  if (precision_.allows_matmul()) {
    micro.accumulate_matmul(layer.weight.id, samples,
                            as_gradients(dy, samples * layer.out, rounded_dy_), layer.out,
                            GA_TRANSPOSE, as_gradients(x, samples * layer.in, rounded_x_), layer.in,
                            GA_NO_TRANSPOSE, precision_.gradients);
    return;
  }
  multiply(CUBLAS_OP_N, CUBLAS_OP_T, layer.in, layer.out, samples, x, layer.in, dy, layer.out,
           weight_gradient_.get());
  micro.accumulate_part(layer.weight.id, as_gradients(weight_gradient_.get(), layer.out * layer.in,
                                                      rounded_gradient_));
}

// Returns the gradients in the dtype that the library expects: rounded to buffer, or values for
// f32.
const void* CudaMlp::as_gradients(const float* values, std::int64_t count,
                                  const Array<std::byte>& buffer) const {
  if (precision_.gradients == GA_F32) return values;
  each(count, Round{values, precision_.gradients, buffer.get()});
  return buffer.get();
}

Mlp::Score CudaMlp::take_score() {
  std::vector<Sums> sums(static_cast<std::size_t>(sums_.count()));
  sums_.read(sums.data());
  check(cudaMemset(sums_.get(), 0, sums_.bytes()));
  Score score;
  for (const Sums& of_place : sums) {
    score.loss += of_place.loss;
    score.correct += of_place.correct;
  }
  return score;
}

void CudaMlp::read_parameters() {
  if (precision_.parameters == GA_F32) return;
  each_tensor([this](Tensor& tensor) {
    each(tensor.values.count(),
         Widen{tensor.stored.get(), precision_.parameters, tensor.values.get()});
  });
}

Mlp::Values CudaMlp::parameters() {
  Values all;
  each_tensor([&all](Tensor& tensor) {
    all.emplace_back(static_cast<std::size_t>(tensor.values.count()));
    tensor.values.read(all.back().data());
  });
  return all;
}

Mlp::Values CudaMlp::averages(gradaccum::Context& context) {
  Values all;
  each_tensor([&](Tensor& tensor) {
    const Array<float> average(tensor.values.count());
    context.ema_copy_to(tensor.id, average.get());
    all.emplace_back(static_cast<std::size_t>(average.count()));
    average.read(all.back().data());
  });
  return all;
}

void CudaMlp::exchange(Values& values) {
  std::size_t i = 0;
  each_tensor([&](Tensor& tensor) {
    std::vector<float> mine(values[i].size());
    tensor.values.read(mine.data());
    tensor.values.write(values[i].data());
    values[i++] = std::move(mine);
  });
}

std::int64_t CudaMlp::parameter_bytes() const {
  std::size_t bytes = 0;
  for (const Layer& layer : layers_) {
    for (const Tensor* tensor : {&layer.weight, &layer.bias}) {
      bytes += tensor->values.bytes() + tensor->stored.bytes();
    }
  }
  return static_cast<std::int64_t>(bytes);
}

std::int64_t CudaMlp::activation_bytes() const {
  std::size_t bytes = rounded_dy_.bytes() + rounded_x_.bytes();
  for (const auto& tensor : activations_) bytes += tensor.bytes();
  for (const auto& tensor : gradients_) bytes += tensor.bytes();
  return static_cast<std::int64_t>(bytes);
}

}  // namespace

std::unique_ptr<Mlp> make_cuda_mlp(const Start& start, std::int64_t max_samples,
                                   const Precision& precision) {
  return std::make_unique<CudaMlp>(start, max_samples, precision);
}

// SPDX-License-Identifier: Apache-2.0
// Prints what `run` in this folder needs to know about the machine. Exits with 77, and the reason,
// if there is no usable GPU.
#include <cuda_runtime.h>
#include <stdio.h>

int main() {
  int count = 0, driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    printf("skipped: no GPU: %s (driver for CUDA %d.%d, runtime %d.%d)\n",
           error != cudaSuccess ? cudaGetErrorString(error) : "none is visible", driver / 1000,
           driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    return 77;
  }
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
      printf("device %d: %s\n", device, cudaGetErrorString(cudaGetLastError()));
      return 1;
    }
    int kilohertz = 0, bits = 0;  // 0 if the driver does not tell them
    cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device);
    cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device);
    printf(
        "device %d: %s, compute capability %d.%d, %d multiprocessors, %zu MiB, driver for CUDA "
        "%d.%d, runtime %d.%d",
        device, properties.name, properties.major, properties.minor, properties.multiProcessorCount,
        properties.totalGlobalMem >> 20, driver / 1000, driver % 1000 / 10, runtime / 1000,
        runtime % 1000 / 10);
    // Two transfers a clock.
    if (kilohertz > 0 && bits > 0)
      printf(", memory %.0f GB/s by its clock", 2e3 * kilohertz * (bits / 8) * 1e-9);
    printf("\n");
  }
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * The build of the library. Versions are 10000 major + 100 minor + patch, 0 for a module that could
 * not be loaded.
 *
 * @param version of the library
 * @param onednn of the oneDNN that multiplies matrices on the CPU
 * @param cudaRuntime of the CUDA that the module was built with
 * @param cudaDriver the newest CUDA that this machine's driver runs; 0: no driver
 * @param openmp _OPENMP, a date; 0: built without OpenMP
 * @param compiler such as "gcc 12.2.0"
 * @param cpuLoops the CPU kernels: names for GA_CPU_ISA, separated by spaces
 */
public record Build(
    int version,
    int onednn,
    int cudaRuntime,
    int cudaDriver,
    int openmp,
    String compiler,
    String cpuLoops) {

  static Build read(ga_build from) {
    return new Build(
        from.getVersion(),
        from.getOnednn(),
        from.getCuda_runtime(),
        from.getCuda_driver(),
        from.getOpenmp(),
        from.getCompiler(),
        from.getCpu_loops());
  }
}

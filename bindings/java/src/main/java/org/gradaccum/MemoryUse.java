// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * Bytes that the library owns for a context, by purpose, as registered so far; without parameters
 * and gradients.
 *
 * @param accumulators accumulators
 * @param optimizerState optimizer state
 * @param workspace partial norms and tables, and scratch of matrix products
 * @param total all of them
 * @param masters master weights
 * @param averages moving averages
 * @param rows for {@link ParamOptions#rows}
 * @param batchNorm statistics of batch normalisation
 * @param resident of total, what is written so far; on a device, what is allocated
 * @param eager with {@link Config#eager}: a second set of what updates write
 */
public record MemoryUse(
    long accumulators,
    long optimizerState,
    long workspace,
    long total,
    long masters,
    long averages,
    long rows,
    long batchNorm,
    long resident,
    long eager) {

  static MemoryUse read(ga_memory from) {
    return new MemoryUse(
        from.getAccumulators(),
        from.getOptimizer_state(),
        from.getWorkspace(),
        from.getTotal(),
        from.getMasters(),
        from.getAverages(),
        from.getRows(),
        from.getBatch_norm(),
        from.getResident(),
        from.getEager());
  }
}

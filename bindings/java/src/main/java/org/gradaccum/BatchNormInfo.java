// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * What the library knows of a layer of batch normalisation.
 *
 * @param name its name
 * @param channels its channels
 * @param gamma the id of the parameter that scales; -1: none
 * @param beta the id of the parameter that shifts; -1: none
 * @param mode whose mean and variance normalise
 * @param layout the order of dimensions
 * @param dtype of x, y and their gradients
 * @param biased whether the running variance averages the biased variance
 * @param frozen whether it is frozen
 * @param momentum of the running statistics
 * @param eps what is added to the variance
 */
public record BatchNormInfo(
    String name,
    long channels,
    int gamma,
    int beta,
    BatchNormOptions.Mode mode,
    BatchNormOptions.Layout layout,
    Dtype dtype,
    boolean biased,
    boolean frozen,
    double momentum,
    double eps) {

  static BatchNormInfo read(ga_bn_info from) {
    return new BatchNormInfo(
        from.getName(),
        from.getChannels(),
        from.getGamma(),
        from.getBeta(),
        BatchNormOptions.Mode.of(from.getMode()),
        BatchNormOptions.Layout.of(from.getLayout()),
        Dtype.of(from.getDtype()),
        from.getBiased() != 0,
        from.getFrozen() != 0,
        from.getMomentum(),
        from.getEps());
  }
}

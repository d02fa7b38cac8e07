// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.util.List;
import java.util.stream.LongStream;

/**
 * What the library knows of a parameter.
 *
 * @param name its name
 * @param group the id of its group
 * @param dtype of its elements
 * @param gradientDtype of its gradients
 * @param accumulatorDtype of its accumulator
 * @param data the address of the tensor
 * @param shape its dimensions
 * @param frozen whether it is frozen
 * @param count elements
 * @param offset elements from the start of its flat block; else 0
 * @param slot which gradient of {@link Context#accumulate} is its own
 * @param lrScale factor of the learning rate
 * @param weightDecayScale factor of the weight decay
 */
public record ParamInfo(
    String name,
    int group,
    Dtype dtype,
    Dtype gradientDtype,
    Dtype accumulatorDtype,
    long data,
    List<Long> shape,
    boolean frozen,
    long count,
    long offset,
    long slot,
    double lrScale,
    double weightDecayScale) {

  static ParamInfo read(ga_param_info from) {
    return new ParamInfo(
        from.getName(),
        from.getGroup(),
        Dtype.of(from.getDtype()),
        Dtype.of(from.getGradient_dtype()),
        Dtype.of(from.getAccumulator_dtype()),
        from.getData(),
        LongStream.range(0, from.getRank())
            .map(axis -> from.dimension((int) axis))
            .boxed()
            .toList(),
        from.getFrozen() != 0,
        from.getCount(),
        from.getOffset(),
        from.getSlot(),
        from.getLr_scale(),
        from.getWeight_decay_scale());
  }
}

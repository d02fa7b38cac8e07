// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/** Parameters that share an optimizer. Made by {@link Context#addGroup}. */
public final class Group {
  private final Context context;
  private final int id;

  Group(Context context, int id) {
    this.context = context;
    this.id = id;
  }

  /**
   * The context of the group.
   *
   * @return the context
   */
  public Context context() {
    return context;
  }

  /**
   * The number of the group: 0, 1, 2, ... in the order they were added.
   *
   * @return the number
   */
  public int id() {
    return id;
  }

  /**
   * The optimizer, with the learning rate and the weight decay that were set last.
   *
   * @return the optimizer
   */
  public Optimizer optimizer() {
    long c = context.enter();
    try (ga_optimizer optimizer = new ga_optimizer(0, 0)) {
      Raw.ga_group_optimizer(c, id, optimizer);
      return Optimizer.read(optimizer).build();
    } finally {
      context.exit();
    }
  }

  /**
   * Gives the group other hyper-parameters. What decides which state there is may not change.
   *
   * @param optimizer the new hyper-parameters
   */
  public void setOptimizer(Optimizer optimizer) {
    Check.notNull(optimizer, "optimizer");
    long c = context.enter();
    try (ga_optimizer fields = new ga_optimizer(0, 0)) {
      optimizer.write(fields);
      Raw.ga_group_set_optimizer(c, id, fields);
    } finally {
      context.exit();
    }
  }

  /**
   * The learning rate of the next applied step.
   *
   * @return the learning rate
   */
  public double lr() {
    long c = context.enter();
    try {
      double[] lr = new double[1];
      Raw.ga_group_lr(c, id, lr);
      return lr[0];
    } finally {
      context.exit();
    }
  }

  /**
   * The learning rate of the last applied step.
   *
   * @return the learning rate; 0 before the first step
   */
  public double lastLr() {
    long c = context.enter();
    try {
      double[] lr = new double[1];
      Raw.ga_group_last_lr(c, id, lr);
      return lr[0];
    } finally {
      context.exit();
    }
  }

  /**
   * Sets the learning rate, or its peak under a schedule.
   *
   * @param lr finite, &gt;= 0
   */
  public void setLr(double lr) {
    long c = context.enter();
    try {
      Raw.ga_group_set_lr(c, id, lr);
    } finally {
      context.exit();
    }
  }

  /**
   * Sets the weight decay.
   *
   * @param weightDecay finite, &gt;= 0
   */
  public void setWeightDecay(double weightDecay) {
    long c = context.enter();
    try {
      Raw.ga_group_set_weight_decay(c, id, weightDecay);
    } finally {
      context.exit();
    }
  }

  /**
   * Freezes or unfreezes each parameter that the group has now. Between windows.
   *
   * @param frozen true to freeze
   */
  public void setFrozen(boolean frozen) {
    long c = context.enter();
    try {
      Raw.ga_group_set_frozen(c, id, frozen ? 1 : 0);
    } finally {
      context.exit();
    }
  }

  /**
   * Sets the schedule of the learning rate.
   *
   * @param schedule the schedule
   */
  public void setSchedule(Schedule schedule) {
    Check.notNull(schedule, "schedule");
    long c = context.enter();
    try (ga_schedule fields = new ga_schedule(0)) {
      schedule.write(fields);
      Raw.ga_group_set_schedule(c, id, fields);
    } finally {
      context.exit();
    }
  }

  /** Removes the schedule of the learning rate. */
  public void clearSchedule() {
    long c = context.enter();
    try {
      Raw.ga_group_set_schedule(c, id, null);
    } finally {
      context.exit();
    }
  }

  /**
   * Gives the group a clip of its own, in place of the context's.
   *
   * @param clip the clip
   */
  public void setClip(Clip clip) {
    Check.notNull(clip, "clip");
    long c = context.enter();
    try (ga_clip fields = new ga_clip()) {
      clip.write(fields);
      Raw.ga_group_set_clip(c, id, fields);
    } finally {
      context.exit();
    }
  }

  /** Clips the group as the context says. */
  public void clearClip() {
    long c = context.enter();
    try {
      Raw.ga_group_set_clip(c, id, null);
    } finally {
      context.exit();
    }
  }

  /**
   * What the group is clipped by.
   *
   * @return a clip of its own, or the context's
   */
  public Clip clip() {
    long c = context.enter();
    try (ga_clip fields = new ga_clip()) {
      Raw.ga_group_clip(c, id, fields);
      return Clip.read(fields).build();
    } finally {
      context.exit();
    }
  }

  @Override
  public String toString() {
    return "group " + id;
  }
}

  /**
   * Whether the step was applied.
   *
   * @return true if parameters and state have moved
   */
  public boolean applied() {
    return outcome == Outcome.APPLIED;
  }

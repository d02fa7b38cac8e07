  /**
   * Begins with the defaults and a scope.
   *
   * @param scope whose norm
   * @return the builder
   */
  public static Builder builder(Scope scope) {
    return builder().scope(Check.notNull(scope, "scope"));
  }

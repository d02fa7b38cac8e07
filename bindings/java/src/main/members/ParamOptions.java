  private static int valueOf(Optional<Config.Reduce> reduce) {
    if (reduce.isPresent() && reduce.get() != Config.Reduce.MAX) {
      throw new IllegalArgumentException(
          "reduce was " + reduce.get() + ", expected MAX, or empty for that of the context");
    }
    return reduce.map(Config.Reduce::value).orElse(0);
  }

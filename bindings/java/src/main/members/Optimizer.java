  /**
   * Begins with PyTorch's defaults of an optimizer.
   *
   * @param kind the optimizer
   * @return the builder
   */
  public static Builder builder(Kind kind) {
    return builder(kind, Flavor.TORCH);
  }

  /**
   * Begins with the defaults that a framework has for an optimizer.
   *
   * @param kind the optimizer
   * @param flavor the framework
   * @return the builder
   * @throws GradAccumException {@link Status#UNSUPPORTED}: the optimizer has no such flavor
   */
  public static Builder builder(Kind kind, Flavor flavor) {
    Check.notNull(kind, "kind");
    Check.notNull(flavor, "flavor");
    try (ga_optimizer defaults = new ga_optimizer(kind.value(), flavor.value())) {
      return read(defaults);
    }
  }

  /**
   * The coefficients of a Newton-Schulz iteration.
   *
   * @param a of X
   * @param b of X X^T X
   * @param c of X X^T X X^T X
   */
  public record NewtonSchulz(double a, double b, double c) {
    static NewtonSchulz read(ga_optimizer from) {
      return new NewtonSchulz(
          from.ns_coefficient(0), from.ns_coefficient(1), from.ns_coefficient(2));
    }

    void write(ga_optimizer to) {
      to.set_ns_coefficient(0, a);
      to.set_ns_coefficient(1, b);
      to.set_ns_coefficient(2, c);
    }

    static List<NewtonSchulz> readTable(ga_optimizer from) {
      NewtonSchulz[] rows = new NewtonSchulz[from.ns_table_size() / 3];
      for (int i = 0; i < rows.length; ++i) {
        rows[i] =
            new NewtonSchulz(
                from.ns_table_number(3 * i),
                from.ns_table_number(3 * i + 1),
                from.ns_table_number(3 * i + 2));
      }
      return List.of(rows);
    }

    static void writeTable(List<NewtonSchulz> table, ga_optimizer to) {
      to.set_ns_table(
          table.stream().flatMapToDouble(row -> DoubleStream.of(row.a, row.b, row.c)).toArray());
    }
  }

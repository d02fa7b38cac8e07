  /**
   * The size of an element; of {@link #STATE_8BIT}, without the scales of blocks.
   *
   * @return bytes
   */
  public int bytes() {
    return switch (this) {
      case U8, STATE_8BIT -> 1;
      case F16, BF16 -> 2;
      case F32, I32 -> 4;
      case F64, I64 -> 8;
    };
  }

  /** Where 0 is a default that depends on something else. */
  static Optional<Dtype> ofOptional(int value) {
    return value == 0 ? Optional.empty() : Optional.of(of(value));
  }

  static int value(Optional<Dtype> dtype) {
    return dtype.map(Dtype::value).orElse(0);
  }

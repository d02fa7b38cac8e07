  /** A status that a newer library has and this package does not know: a failure. */
  UNKNOWN(-1);

  private final int value;

  Status(int value) {
    this.value = value;
  }

  int value() {
    return value;
  }

  static Status of(int value) {
    for (Status status : values()) {
      if (status.value == value) {
        return status;
      }
    }
    return UNKNOWN;
  }

  /** Hears how far a save or a load has come. */
  @FunctionalInterface
  public interface Progress {
    /**
     * Called on the thread of the save or load, which must not use the context. What this method
     * throws cancels the call, as long as a load has not begun to change the context, and comes
     * out of it.
     *
     * @param done bytes that are done
     * @param total bytes of all
     */
    void progress(long done, long total);
  }

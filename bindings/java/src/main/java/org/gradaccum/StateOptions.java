// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * Options of saving and loading.
 *
 * @param parts what is saved or loaded; default ALL
 * @param settings what a load does about the settings in the file; default COMPARE
 * @param allowMissing a load leaves what the file has nothing of as it is; default false
 * @param allowExtra a load skips what the context has no place for; default false
 * @param unmarked a load takes a safetensors file of another program; default false
 * @param progress is called now and then; null, the default: nothing is
 * @param note of a save: a text of the program's own, such as its place in the data; null, the
 *     default: none
 */
public record StateOptions(
    Parts parts,
    Settings settings,
    boolean allowMissing,
    boolean allowExtra,
    boolean unmarked,
    Progress progress,
    String note) {

  /**
   * Begins with the defaults.
   *
   * @return the builder
   */
  public static Builder builder() {
    try (ga_state_options defaults = new ga_state_options()) {
      return read(defaults);
    }
  }

  /**
   * Makes a builder that begins with these values.
   *
   * @return the builder
   */
  public Builder toBuilder() {
    Builder builder = new Builder();
    builder.parts = parts;
    builder.settings = settings;
    builder.allowMissing = allowMissing;
    builder.allowExtra = allowExtra;
    builder.unmarked = unmarked;
    builder.progress = progress;
    builder.note = note;
    return builder;
  }

  static Builder read(ga_state_options from) {
    Builder builder = new Builder();
    builder.parts = Parts.of(from.getParts());
    builder.settings = Settings.of(from.getSettings());
    builder.allowMissing = from.getAllow_missing() != 0;
    builder.allowExtra = from.getAllow_extra() != 0;
    builder.unmarked = from.getUnmarked() != 0;
    builder.progress = null;
    builder.note = null;
    return builder;
  }

  /** Refuses null, in a builder and where a record is used that was made without one. */
  private StateOptions checked() {
    Check.notNull(parts, "parts");
    Check.notNull(settings, "settings");
    return this;
  }

  void write(ga_state_options to) {
    checked();
    to.setParts(parts.value());
    to.setSettings(settings.value());
    to.setAllow_missing(allowMissing ? 1 : 0);
    to.setAllow_extra(allowExtra ? 1 : 0);
    to.setUnmarked(unmarked ? 1 : 0);
    // The call that uses the options sets progress: the address of a relay, which it owns.
    to.set_note(note);
  }

  /** Collects the values of a StateOptions. */
  public static final class Builder {
    private Parts parts;
    private Settings settings;
    private boolean allowMissing;
    private boolean allowExtra;
    private boolean unmarked;
    private Progress progress;
    private String note;

    private Builder() {}

    /**
     * Sets parts.
     *
     * @param parts what is saved or loaded; default ALL
     * @return this builder
     */
    public Builder parts(Parts parts) {
      this.parts = parts;
      return this;
    }

    /**
     * Sets settings.
     *
     * @param settings what a load does about the settings in the file; default COMPARE
     * @return this builder
     */
    public Builder settings(Settings settings) {
      this.settings = settings;
      return this;
    }

    /**
     * Sets allowMissing.
     *
     * @param allowMissing a load leaves what the file has nothing of as it is; default false
     * @return this builder
     */
    public Builder allowMissing(boolean allowMissing) {
      this.allowMissing = allowMissing;
      return this;
    }

    /**
     * Sets allowExtra.
     *
     * @param allowExtra a load skips what the context has no place for; default false
     * @return this builder
     */
    public Builder allowExtra(boolean allowExtra) {
      this.allowExtra = allowExtra;
      return this;
    }

    /**
     * Sets unmarked.
     *
     * @param unmarked a load takes a safetensors file of another program; default false
     * @return this builder
     */
    public Builder unmarked(boolean unmarked) {
      this.unmarked = unmarked;
      return this;
    }

    /**
     * Sets progress.
     *
     * @param progress is called now and then; null, the default: nothing is
     * @return this builder
     */
    public Builder progress(Progress progress) {
      this.progress = progress;
      return this;
    }

    /**
     * Sets note.
     *
     * @param note of a save: a text of the program's own, such as its place in the data; null, the
     *     default: none
     * @return this builder
     */
    public Builder note(String note) {
      this.note = note;
      return this;
    }

    /**
     * Makes an immutable value of what was set.
     *
     * @return the value
     */
    public StateOptions build() {
      return new StateOptions(
          parts,
          settings,
          allowMissing,
          allowExtra,
          unmarked,
          progress,
          note).checked();
    }
  }

  /** What is saved or loaded. */
  public enum Parts implements Numbered {
    /** The parameters and what the library keeps. */
    ALL(RawConstants.GA_STATE_ALL),
    /** Not the parameters, which the program saves by itself. */
    LIBRARY(RawConstants.GA_STATE_LIBRARY),
    /** The parameters, and the running statistics of batch normalisation: a plain model file. */
    PARAMETERS(RawConstants.GA_STATE_PARAMETERS);

    private final int value;

    Parts(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Parts of(int value) {
      return Numbered.of(values(), value);
    }
  }

  /** What a load does about settings. */
  public enum Settings implements Numbered {
    /** If one differs that changes numbers, the load fails and lists what differs. */
    COMPARE(RawConstants.GA_SETTINGS_COMPARE),
    /** Takes hyper-parameters, schedules, clips, loss scale and frozen parameters from the file. */
    TAKE(RawConstants.GA_SETTINGS_TAKE),
    /** Keeps those of the context. */
    KEEP(RawConstants.GA_SETTINGS_KEEP);

    private final int value;

    Settings(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Settings of(int value) {
      return Numbered.of(values(), value);
    }
  }

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
}

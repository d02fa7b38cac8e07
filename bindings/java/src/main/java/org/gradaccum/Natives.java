// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.io.IOException;
import java.io.InputStream;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.DirectoryIteratorException;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.LinkOption;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;
import java.nio.file.attribute.PosixFilePermissions;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;

/**
 * Loads the library: from the folder that a property or the environment names, else from the jar,
 * else from where the system looks. The first that is there is loaded.
 *
 * <p>What comes from a jar is copied to a folder of its own, all files together, because the
 * library opens its modules in its own folder, on demand. The folder is removed at exit, but on
 * Windows, which removes no library that is loaded; what a process has left is removed by the next
 * one.
 */
final class Natives {
  private static final String PROPERTY = "gradaccum.native.path";
  private static final String VARIABLE = "GRADACCUM_NATIVE_PATH";
  private static final String SHIM = "gradaccum_jni";
  private static final String FOLDER = "gradaccum-";
  private static final String LOCK = "lock";

  // Windows looks for what a DLL needs beside the program, not beside that DLL, but takes what is
  // loaded already under the same name; so the library, whose name has the version of the ABI, is
  // loaded first.
  private static final boolean IS_WINDOWS = system().startsWith("windows");
  private static final String LIBRARY = "gradaccum-" + RawConstants.GA_VERSION / 10000;

  /** What the bundled library needs; a test holds it against the files. */
  static final String GLIBC = "2.35";

  // Held until exit: its lock tells other processes that the folder is in use.
  private static FileChannel lock;

  private Natives() {}

  /** Called when {@code RawJNI} is initialised, so once for a class loader. */
  static void load() {
    List<String> tried = new ArrayList<>();
    String from = find(tried);
    if (from == null) {
      throw new UnsatisfiedLinkError(
          "libgradaccum was not found. Tried:\n  " + String.join("\n  ", tried));
    }
    int version = RawJNI.ga_version();
    if (!fits(version)) {
      throw new UnsatisfiedLinkError(
          "the library in %s is libgradaccum %s, but this package was made for %s"
              .formatted(from, text(version), text(RawConstants.GA_VERSION)));
    }
  }

  /** Loads the library, and says where it was found; null: nowhere. */
  private static String find(List<String> tried) {
    String file = System.mapLibraryName(SHIM);
    for (String[] named :
        new String[][] {
          {"the property " + PROPERTY, System.getProperty(PROPERTY)},
          {"the environment variable " + VARIABLE, System.getenv(VARIABLE)}
        }) {
      if (named[1] == null || named[1].isEmpty()) {
        tried.add(named[0] + ": not set");
      } else if (Files.exists(Path.of(named[1], file))) {
        load(Path.of(named[1], file).toAbsolutePath());
        return named[1];
      } else {
        tried.add(named[0] + ": " + Path.of(named[1], file) + " does not exist");
      }
    }
    String bundled = "native/" + platform() + "/";
    if (Natives.class.getResource(bundled + "natives.txt") != null) {
      Path folder = extract(bundled);
      load(folder.resolve(file));
      return folder.toString();
    }
    tried.add("the jar: it has no /org/gradaccum/" + bundled);
    try {
      if (IS_WINDOWS) {
        System.loadLibrary(LIBRARY);
      }
      System.loadLibrary(SHIM);
      return "java.library.path";
    } catch (UnsatisfiedLinkError e) {
      tried.add("java.library.path: " + explain(e.getMessage()));
    } catch (IllegalCallerException e) {
      throw denied(e);
    }
    return null;
  }

  private static String system() {
    return System.getProperty("os.name").toLowerCase(Locale.ROOT);
  }

  /** The folder of the jar: linux-x86_64, linux-musl-aarch64, macos-aarch64, windows-x86_64. */
  private static String platform() {
    String os = system();
    if (os.startsWith("mac")) {
      os = "macos";
    } else if (IS_WINDOWS) {
      os = "windows";
    } else if (isMusl()) {
      os += "-musl";
    }
    String architecture = System.getProperty("os.arch");
    return os + "-" + (architecture.equals("amd64") ? "x86_64" : architecture);
  }

  private static void load(Path file) {
    if (IS_WINDOWS) {
      isNowLoaded(file.resolveSibling(System.mapLibraryName(LIBRARY)));
    }
    if (isNowLoaded(file)) {
      return;
    }
    // Java loads a file for one class loader only. A copy of it finds the library that is loaded.
    try {
      Path copy = createFolder().resolve(file.getFileName());
      Files.copy(file, copy);
      removeAtExit(copy);
      System.load(copy.toString());
    } catch (IOException | UnsatisfiedLinkError failure) {
      throw failed(file, failure);
    }
  }

  /** Loads a file; false: another class loader of this process has it. */
  private static boolean isNowLoaded(Path file) {
    try {
      System.load(file.toString());
      return true;
    } catch (IllegalCallerException e) {
      throw denied(e);
    } catch (UnsatisfiedLinkError e) {
      if (e.getMessage().contains("already loaded in another classloader")) {
        return false;
      }
      throw failed(file, e);
    }
  }

  private static UnsatisfiedLinkError failed(Path file, Throwable why) {
    return error(file + " could not be loaded: " + explain(String.valueOf(why.getMessage())), why);
  }

  private static UnsatisfiedLinkError denied(IllegalCallerException why) {
    return error(
        "Java was told not to load libraries for this code: start it with"
            + " --enable-native-access=ALL-UNNAMED, or with the name of the module that"
            + " gradaccum.jar is in",
        why);
  }

  private static UnsatisfiedLinkError error(String message, Throwable why) {
    UnsatisfiedLinkError error = new UnsatisfiedLinkError(message);
    error.initCause(why);
    return error;
  }

  /** The message of the system, and what it means as far as that is known. */
  static String explain(String message) {
    String meaning = "";
    if (message.contains("failed to map segment") || message.contains("Operation not permitted")) {
      meaning =
          "the file system of the folder is mounted noexec; name another folder by the property"
              + " java.io.tmpdir, or one with the library by "
              + PROPERTY;
    } else if (message.contains("libgomp")) {
      meaning = "OpenMP's library is missing; install libgomp (in Debian: libgomp1)";
    } else if (message.contains("Possible cause: can't load")
        || message.contains("wrong ELF class")
        || message.contains("Exec format error")) {
      meaning =
          "the library was made for another processor than this Java, "
              + System.getProperty("os.arch");
    } else if (message.contains("GLIBC_")) {
      meaning = "the library needs glibc " + GLIBC + " or newer";
    } else if (isMusl()) {
      meaning = "this system has musl, and the library needs glibc " + GLIBC + " or newer";
    }
    return meaning.isEmpty() ? message : message + " (" + meaning + ")";
  }

  /** Whether this process runs on musl: a system may have both C libraries. */
  private static boolean isMusl() {
    try {
      return Files.readString(Path.of("/proc/self/maps"), StandardCharsets.ISO_8859_1)
          .contains("/ld-musl-");
    } catch (IOException e) {
      return false;
    }
  }

  // ---- The files of a jar

  private static Path extract(String bundled) {
    Path folder = Path.of(System.getProperty("java.io.tmpdir"));
    try {
      folder = createFolder();
      for (String name : names(bundled)) {
        Path file = folder.resolve(name);
        removeAtExit(file);
        try (InputStream in = Natives.class.getResourceAsStream(bundled + name)) {
          if (in == null) {
            throw new IOException("the jar has no " + name);
          }
          Files.copy(in, file);
        }
      }
      return folder;
    } catch (IOException e) {
      throw error(
          "the library of the jar could not be copied to " + folder + ": " + e
              + ". Name another folder by the property java.io.tmpdir, or one with the library by "
              + PROPERTY,
          e);
    }
  }

  private static List<String> names(String bundled) throws IOException {
    try (InputStream in = Natives.class.getResourceAsStream(bundled + "natives.txt")) {
      return new String(in.readAllBytes(), StandardCharsets.UTF_8).lines().toList();
    }
  }

  /**
   * A new folder that only this user can read, with a lock that this process holds until exit. On
   * Windows, java.io.tmpdir says who can read it.
   */
  private static Path createFolder() throws IOException {
    Path parent = Path.of(System.getProperty("java.io.tmpdir"));
    String prefix = FOLDER + ProcessHandle.current().pid() + "-";
    Path folder =
        IS_WINDOWS
            ? Files.createTempDirectory(parent, prefix)
            : Files.createTempDirectory(
                parent,
                prefix,
                PosixFilePermissions.asFileAttribute(PosixFilePermissions.fromString("rwx------")));
    // Deleted in the reverse order: the folder last.
    removeAtExit(folder);
    removeAtExit(folder.resolve(LOCK));
    // The file has its name once it is locked: a folder with a lock that is free is abandoned.
    Path unlocked = folder.resolve("lock.new");
    lock = FileChannel.open(unlocked, StandardOpenOption.CREATE_NEW, StandardOpenOption.WRITE);
    lock.lock();
    Files.move(unlocked, folder.resolve(LOCK), StandardCopyOption.ATOMIC_MOVE);
    sweep(parent, folder);
    return folder;
  }

  private static void removeAtExit(Path path) {
    if (!IS_WINDOWS) {
      path.toFile().deleteOnExit();
    }
  }

  /** Removes folders of processes that have ended. What cannot be removed stays. */
  private static void sweep(Path parent, Path own) {
    String process = FOLDER + ProcessHandle.current().pid() + "-";
    try (DirectoryStream<Path> folders = Files.newDirectoryStream(parent, FOLDER + "*")) {
      Object user = Files.getOwner(own);
      for (Path folder : folders) {
        // Closing a file of this process would free its lock, so its folders are left alone.
        if (folder.getFileName().toString().matches(FOLDER + "\\d+-\\d+")
            && !folder.getFileName().toString().startsWith(process)
            && Files.isDirectory(folder, LinkOption.NOFOLLOW_LINKS)) {
          removeAbandoned(folder, user);
        }
      }
    } catch (IOException | DirectoryIteratorException e) {
      // Another process may sweep too.
    }
  }

  private static void removeAbandoned(Path folder, Object user) {
    Path itsLock = folder.resolve(LOCK);
    try {
      if (!Files.getOwner(folder, LinkOption.NOFOLLOW_LINKS).equals(user)) {
        return;
      }
      try (FileChannel channel =
          FileChannel.open(itsLock, StandardOpenOption.WRITE, LinkOption.NOFOLLOW_LINKS)) {
        if (channel.tryLock() == null) {
          return;
        }
        try (DirectoryStream<Path> files = Files.newDirectoryStream(folder)) {
          for (Path file : files) {
            if (!file.equals(itsLock)) {
              Files.delete(file);
            }
          }
        }
      }
      Files.deleteIfExists(itsLock); // closed, for on Windows a file that is open stays
      Files.delete(folder);
    } catch (IOException | DirectoryIteratorException e) {
      // It is in use, has no lock yet, or is swept by another process.
    }
  }

  // ---- Versions

  /** Before 1.0, a minor release may change the interface. */
  private static boolean fits(int version) {
    int expected = RawConstants.GA_VERSION;
    return version / 10000 == expected / 10000
        && (expected >= 10000 || version / 100 == expected / 100);
  }

  private static String text(int version) {
    return version / 10000 + "." + version / 100 % 100 + "." + version % 100;
  }
}

// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotSame;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import java.io.IOException;
import java.io.RandomAccessFile;
import java.net.URL;
import java.net.URLClassLoader;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.nio.file.attribute.PosixFilePermissions;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.jar.JarFile;
import java.util.zip.ZipEntry;
import javax.xml.parsers.DocumentBuilderFactory;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** Where the natives come from, each time in a JVM of its own. */
class LoaderTest {
  private static final String JAR = System.getProperty("gradaccum.test.jar", "");
  private static final String FOLDER = System.getProperty("gradaccum.native.path");
  private static final String CLASSES = System.getProperty("gradaccum.test.classes");
  private static final Path SOURCE = Path.of(System.getProperty("gradaccum.test.source"));
  private static final String PLAIN = System.getProperty("gradaccum.test.plain");
  private static final String GOOD = "values -5.0 -7.0";

  private Path temporary;

  @BeforeEach
  void open() throws IOException {
    assumeTrue(!JAR.isEmpty(), "there is no jar: a sanitized library is not packed");
    temporary = Files.createTempDirectory("gradaccum-test");
  }

  @AfterEach
  void close() throws IOException {
    if (temporary != null) {
      try (var files = Files.walk(temporary)) {
        for (Path file : files.sorted(Comparator.reverseOrder()).toList()) {
          Files.delete(file);
        }
      }
    }
  }

  private record Run(int status, String output) {}

  private List<String> command(String classes, List<String> options, String... arguments) {
    List<String> command = new ArrayList<>();
    command.add(Path.of(System.getProperty("java.home"), "bin", "java").toString());
    command.addAll(List.of("-Xcheck:jni", "-Djava.io.tmpdir=" + temporary, "-Xmx256m"));
    if (Runtime.version().feature() >= 24
        && options.stream().noneMatch(option -> option.contains("access"))) {
      command.add("--enable-native-access=ALL-UNNAMED");
    }
    command.addAll(options);
    command.addAll(List.of("-cp", CLASSES + ":" + classes, "org.gradaccum.Probe"));
    command.addAll(Arrays.asList(arguments));
    return command;
  }

  private static Run run(List<String> command, String... environment) throws Exception {
    ProcessBuilder builder = new ProcessBuilder(command).redirectErrorStream(true);
    builder.environment().remove("GRADACCUM_NATIVE_PATH");
    for (int i = 0; i < environment.length; i += 2) {
      builder.environment().put(environment[i], environment[i + 1]);
    }
    Process process = builder.start();
    String output = new String(process.getInputStream().readAllBytes());
    assertTrue(process.waitFor(50, TimeUnit.SECONDS));
    assertFalse(output.contains("WARNING in native method"), output);
    return new Run(process.exitValue(), output);
  }

  private Run run(String classes, List<String> options, String... arguments) throws Exception {
    return run(command(classes, options, arguments));
  }

  private static void contains(Run run, String... texts) {
    for (String text : texts) {
      assertTrue(run.output().contains(text), run.output());
    }
  }

  private List<String> left() throws IOException {
    try (var files = Files.list(temporary)) {
      return files
          .map(file -> file.getFileName().toString())
          .filter(name -> name.startsWith("gradaccum-"))
          .toList();
    }
  }

  @Test
  void fromTheJar() throws Exception {
    Run run = run(JAR, List.of());
    contains(run, GOOD, "maps [" + temporary + "/gradaccum-");
    assertEquals(0, run.status());
    assertEquals(List.of(), left());
  }

  @Test
  void matrixProductsFromTheJar() throws Exception {
    assumeTrue(jarHas("libgradaccum_onednn.so"), "the jar was built without oneDNN");
    contains(run(JAR, List.of(), "matmul"), GOOD, "/libgradaccum_onednn.so");
  }

  private static boolean jarHas(String file) throws IOException {
    try (JarFile jar = new JarFile(JAR)) {
      return jar.stream().anyMatch(entry -> entry.getName().endsWith("/" + file));
    }
  }

  @Test
  void theFolderIsPrivateAndGoesWithTheNextProcess() throws Exception {
    Process process = new ProcessBuilder(command(JAR, List.of(), "hang")).start();
    try {
      var lines = process.inputReader();
      String line = lines.readLine();
      while (line != null && !line.startsWith("maps")) {
        line = lines.readLine();
      }
      Path folder = temporary.resolve(left().get(0));
      assertEquals(
          "rwx------", PosixFilePermissions.toString(Files.getPosixFilePermissions(folder)));
      assertTrue(Files.exists(folder.resolve("lock")));
      // In use, it stays; and so does a folder that is no one's.
      Path strange = Files.createDirectory(temporary.resolve("gradaccum-1-1"));
      contains(run(JAR, List.of()), GOOD);
      assertTrue(Files.exists(folder.resolve("libgradaccum_jni.so")));
      assertTrue(Files.exists(strange));
      process.destroyForcibly().waitFor();
      assertTrue(Files.exists(folder));
      contains(run(JAR, List.of()), GOOD);
      assertFalse(Files.exists(folder));
    } finally {
      process.destroyForcibly();
    }
  }

  @Test
  void aFolderGoesBeforeTheJar() throws Exception {
    String property = "-Dgradaccum.native.path=" + FOLDER;
    contains(run(JAR, List.of(property)), GOOD, "maps [" + FOLDER + "/");
    contains(
        run(command(JAR, List.of()), "GRADACCUM_NATIVE_PATH", FOLDER),
        GOOD,
        "maps [" + FOLDER + "/");
    // The property goes before the variable, and a folder without the library is passed over.
    contains(
        run(command(JAR, List.of(property)), "GRADACCUM_NATIVE_PATH", temporary.toString()),
        GOOD,
        "maps [" + FOLDER + "/");
    contains(
        run(JAR, List.of("-Dgradaccum.native.path=" + temporary)),
        GOOD,
        "maps [" + temporary + "/gradaccum-");
  }

  @Test
  void theJarGoesBeforeTheSystem() throws Exception {
    String path = "-Djava.library.path=" + FOLDER;
    contains(run(JAR, List.of(path)), GOOD, "maps [" + temporary + "/gradaccum-");
    contains(run(PLAIN, List.of(path)), GOOD, "maps [" + FOLDER + "/");
  }

  @Test
  void anErrorListsWhatWasTried() throws Exception {
    Run run =
        run(
            PLAIN,
            List.of("-Dgradaccum.native.path=" + temporary, "-Djava.library.path=" + temporary));
    contains(
        run,
        "UnsatisfiedLinkError: libgradaccum was not found. Tried:",
        "the property gradaccum.native.path: "
            + temporary.resolve("libgradaccum_jni.so")
            + " does not exist",
        "the environment variable GRADACCUM_NATIVE_PATH: not set",
        "the jar: it has no /org/gradaccum/native/",
        "java.library.path: no gradaccum_jni in java.library.path");
    assertEquals(1, run.status());
  }

  /** A folder with the files that the build has made, to spoil one of them. */
  private Path copyOfFolder() throws IOException {
    Path folder = Files.createDirectory(temporary.resolve("natives"));
    for (String name : new String[] {"libgradaccum.so.0", "libgradaccum_jni.so"}) {
      Files.copy(Path.of(FOLDER, name), folder.resolve(name));
    }
    return folder;
  }

  @Test
  void anotherVersion() throws Exception {
    Path folder = copyOfFolder();
    Path source = temporary.resolve("fake.c");
    Files.writeString(source, "int ga_version(void) { return 907; }\n");
    Run compiled =
        run(
            List.of(
                "cc",
                "-shared",
                "-fPIC",
                "-Wl,-soname,libgradaccum.so.0",
                "-Wl,--version-script=" + SOURCE.resolve("src/api/gradaccum.map"),
                "-o",
                folder.resolve("libgradaccum.so.0").toString(),
                source.toString()));
    assertEquals(0, compiled.status(), compiled.output());
    contains(
        run(JAR, List.of("-Dgradaccum.native.path=" + folder)),
        "the library in " + folder + " is libgradaccum 0.9.7, but this package was made for 0.2.0");
  }

  @Test
  void anotherProcessor() throws Exception {
    Path folder = copyOfFolder();
    try (RandomAccessFile file =
        new RandomAccessFile(folder.resolve("libgradaccum_jni.so").toFile(), "rw")) {
      file.seek(18);  // e_machine
      file.write(System.getProperty("os.arch").equals("amd64") ? 0xb7 : 0x3e);
    }
    contains(
        run(JAR, List.of("-Dgradaccum.native.path=" + folder)),
        "made for another processor than this Java");
  }

  @Test
  void aLibraryThatIsMissing() throws Exception {
    Path folder = copyOfFolder();
    Files.delete(folder.resolve("libgradaccum.so.0"));
    contains(
        run(JAR, List.of("-Dgradaccum.native.path=" + folder)),
        folder.resolve("libgradaccum_jni.so") + " could not be loaded: ",
        "libgradaccum.so.0: cannot open shared object file");
  }

  @Test
  void whatTheMessagesOfTheSystemMean() {
    assertTrue(
        Natives.explain("libgomp.so.1: cannot open shared object file")
            .contains("install libgomp"));
    assertTrue(Natives.explain("version `GLIBC_2.38' not found").contains("needs glibc 2.35"));
    assertTrue(Natives.explain("wrong ELF class: ELFCLASS32").contains("another processor"));
    assertEquals("something else", Natives.explain("something else"));
  }

  // Mounts are those of a namespace of the command's own.
  private Run mounted(String options) throws Exception {
    List<String> java = command(JAR, List.of());
    List<String> command =
        new ArrayList<>(
            List.of(
                "unshare",
                "--mount",
                "sh",
                "-c",
                "mount -t tmpfs -o " + options + " tmpfs \"$0\" || exit 77; exec \"$@\"",
                temporary.toString()));
    command.addAll(java);
    Run run;
    try {
      run = run(command);
    } catch (IOException e) {
      run = new Run(77, e.toString());
    }
    assumeTrue(
        run.status() != 77 && !run.output().startsWith("unshare:"),
        "file systems cannot be mounted here");
    return run;
  }

  @Test
  void aFolderMountedNoexec() throws Exception {
    contains(mounted("noexec"), "could not be loaded: ", "is mounted noexec");
  }

  @Test
  void aFolderThatIsFull() throws Exception {
    contains(mounted("size=1m"), "could not be copied to ", "No space left on device");
  }

  @Test
  void aFolderThatIsReadOnlyOrMissing() throws Exception {
    contains(mounted("ro"), "could not be copied to ", "Read-only file system");
    Files.delete(temporary);
    Run run = run(JAR, List.of());
    Files.createDirectory(temporary);
    contains(run, "could not be copied to " + temporary, "Name another folder");
  }

  @Test
  void nativeAccessDenied() throws Exception {
    assumeTrue(
        Runtime.version().feature() >= 24,
        "JDK " + Runtime.version().feature() + " does not restrict native access");
    contains(
        run(JAR, List.of("--illegal-native-access=deny")),
        "start it with --enable-native-access=ALL-UNNAMED");
    contains(run(JAR, List.of("--illegal-native-access=warn")), GOOD);
    contains(
        run(
            JAR,
            List.of("--illegal-native-access=deny", "--enable-native-access=ALL-UNNAMED")),
        GOOD);
  }

  @Test
  void twoClassLoadersInOneJvm() throws Exception {
    String saved = System.getProperty("gradaccum.native.path");
    URL[] urls = {Path.of(JAR).toUri().toURL(), Path.of(CLASSES).toUri().toURL()};
    for (boolean folder : new boolean[] {false, true}) {
      if (!folder) {
        System.clearProperty("gradaccum.native.path");
      }
      try {
        Object[] versions = new Object[2];
        Class<?>[] types = new Class<?>[2];
        for (int i = 0; i < 2; ++i) {
          try (URLClassLoader loader =
              new URLClassLoader(urls, ClassLoader.getPlatformClassLoader())) {
            types[i] = loader.loadClass("org.gradaccum.Library");
            versions[i] = types[i].getMethod("version").invoke(null);
            loader
                .loadClass("org.gradaccum.Probe")
                .getMethod("main", String[].class)
                .invoke(null, (Object) new String[0]);
          }
        }
        assertNotSame(types[0], types[1]);
        assertEquals(versions[0], versions[1]);
      } finally {
        System.setProperty("gradaccum.native.path", saved);
      }
    }
  }

  private static List<String> entries(String jar) throws IOException {
    try (JarFile file = new JarFile(jar)) {
      return file.stream().map(ZipEntry::getName).toList();
    }
  }

  @Test
  void packagesAsMavenHasThem() throws Exception {
    String name = JAR.replaceAll("\\.jar$", "");
    List<String> jar = entries(JAR);
    assertTrue(jar.containsAll(List.of("LICENSE", "org/gradaccum/Context.class")), jar.toString());
    List<String> sources = entries(name + "-sources.jar");
    assertTrue(
        sources.containsAll(List.of("org/gradaccum/Context.java", "org/gradaccum/Raw.java")),
        sources.toString());
    List<String> javadoc = entries(name + "-javadoc.jar");
    assertTrue(javadoc.contains("org/gradaccum/Context.html"), javadoc.toString());
    assertTrue(
        javadoc.stream().noneMatch(entry -> entry.contains("/Raw") || entry.contains("/ga_")),
        javadoc.toString());
    var pom =
        DocumentBuilderFactory.newInstance()
            .newDocumentBuilder()
            .parse(Path.of(name + ".pom").toFile());
    String version = pom.getElementsByTagName("version").item(0).getTextContent();
    String artifact = pom.getElementsByTagName("artifactId").item(0).getTextContent();
    assertEquals(Path.of(JAR).getFileName().toString(), artifact + "-" + version + ".jar");
    String[] numbers = version.split("\\.");
    assertEquals(
        Library.expectedVersion(),
        10000 * Integer.parseInt(numbers[0])
            + 100 * Integer.parseInt(numbers[1])
            + Integer.parseInt(numbers[2]));
  }

  @Test
  void theBundledFilesNeedNoNewerGlibcThanStated() throws Exception {
    Path natives = Files.createDirectory(temporary.resolve("jar"));
    String jar = Path.of(System.getProperty("java.home"), "bin", "jar").toString();
    assertEquals(
        0,
        run(List.of("sh", "-c", "cd '" + natives + "' && '" + jar + "' -xf '" + JAR + "'"))
            .status());
    Run found =
        run(
            List.of(
                "sh",
                "-c",
                "objdump -T $(find '"
                    + natives
                    + "' -name '*.so*') | grep -oE 'GLIBC_2\\.[0-9]+' | sort -uV | tail -n 1"));
    assertEquals("GLIBC_" + Natives.GLIBC, found.output().trim());
    // The C++ runtime of the build is not needed, but by oneDNN, which is Debian's.
    Run needed =
        run(
            List.of(
                "sh",
                "-c",
                "for f in $(find '"
                    + natives
                    + "' -name 'libgradaccum*'); do readelf -dW $f; done | grep NEEDED"));
    assertFalse(needed.output().contains("libstdc++"), needed.output());
    assertFalse(needed.output().contains("libgcc_s"), needed.output());
  }

  @Test
  void aLockThatIsHeldKeepsAFolder() throws Exception {
    Path used = Files.createDirectory(temporary.resolve("gradaccum-999999999-1"));
    Path file = used.resolve("lock");
    try (FileChannel channel =
        FileChannel.open(file, StandardOpenOption.CREATE_NEW, StandardOpenOption.WRITE)) {
      channel.lock();
      contains(run(JAR, List.of()), GOOD);
      assertTrue(Files.exists(file));
    }
    contains(run(JAR, List.of()), GOOD);
    assertFalse(Files.exists(used));
  }
}

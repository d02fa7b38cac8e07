// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.DataInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.regex.MatchResult;
import java.util.regex.Pattern;
import org.junit.jupiter.api.Test;

/** Nothing of gradaccum.h is missing: what the compiled facade calls, against the header. */
class CompletenessTest {
  private static final Path SOURCE = Path.of(System.getProperty("gradaccum.test.source"));

  /** What the facade does not call, with the reason. */
  private static final Map<String, String> NOT_CALLED =
      Map.ofEntries(
          Map.entry("ga_config.parallel_for", "its threads are not those of Java"),
          Map.entry("ga_config.parallel_for_user", "parallel_for is not wrapped"),
          Map.entry("ga_config.allocate", "Java has no memory to give that stays in place"),
          Map.entry("ga_config.free", "allocate is not wrapped"),
          Map.entry("ga_config.allocator_user", "allocate is not wrapped"),
          Map.entry("ga_kept_info.queued", "buffers of Java are not on a device"),
          Map.entry("ga_param_info.shape", "read by dimension()"),
          Map.entry("ga_param_info.rank", "read by dimension()"),
          Map.entry("ga_flat_entry.name", "set by set_name()"),
          Map.entry("ga_flat_entry.shape", "set by set_shape()"),
          Map.entry("ga_flat_entry.rank", "set by set_shape()"),
          Map.entry("ga_schedule.table", "set by set_table()"),
          Map.entry("ga_schedule.table_size", "set by set_table()"),
          Map.entry("ga_optimizer.ns_coefficients", "ns_coefficient()"),
          Map.entry("ga_optimizer.ns_table", "set by set_ns_table()"),
          Map.entry("ga_optimizer.ns_rows", "set by set_ns_table()"),
          Map.entry("ga_state_options.note", "set by set_note()"),
          Map.entry("ga_comm_config.table", "C programs alone bring a transport of their own"),
          Map.entry("ga_comm_config.kind", "set by the constructor"));

  /** Methods by which the facade reaches what it does not call by the name of the header. */
  private static final Set<String> IN_PLACE =
      Set.of(
          "ga_param_info.dimension",
          "ga_param_info.getRank",
          "ga_flat_entry.set_name",
          "ga_flat_entry.set_shape",
          "ga_schedule.set_table",
          "ga_optimizer.ns_coefficient",
          "ga_optimizer.set_ns_coefficient",
          "ga_optimizer.ns_table_size",
          "ga_optimizer.ns_table_number",
          "ga_optimizer.set_ns_table",
          "ga_state_options.set_note");

  private static String header() throws IOException {
    StringBuilder text = new StringBuilder();
    try (var parts = Files.newDirectoryStream(SOURCE.resolve("include/gradaccum"), "*.h")) {
      for (Path part : parts) {
        text.append(Files.readString(part));
      }
    }
    return text.toString();
  }

  /** The exported symbols, which abi.symbols compares with the library and the headers. */
  private static List<String> functions() throws IOException {
    return Files.readAllLines(SOURCE.resolve("tests/abi/symbols.txt"), StandardCharsets.UTF_8).stream()
        .map(line -> line.replaceAll("@.*", ""))
        .toList();
  }

  private static List<MatchResult> all(String pattern, String text) {
    return Pattern.compile(pattern, Pattern.MULTILINE).matcher(text).results().toList();
  }

  /** "Class.method" of every method that the facade refers to. */
  private static Set<String> called() throws Exception {
    Set<String> called = new TreeSet<>();
    URI facade = Context.class.getProtectionDomain().getCodeSource().getLocation().toURI();
    try (var files = Files.walk(Path.of(facade).resolve("org/gradaccum"))) {
      for (Path file : files.filter(Files::isRegularFile).toList()) {
        String name = file.getFileName().toString();
        if (!name.startsWith("Raw") && !name.startsWith("ga_")) {
          try (InputStream stream = Files.newInputStream(file)) {
            methods(new DataInputStream(stream), called);
          }
        }
      }
    }
    return called;
  }

  /** The references to methods in the constant pool of a class. */
  private static void methods(DataInputStream in, Set<String> called) throws IOException {
    in.readInt();
    in.readInt();
    int count = in.readUnsignedShort();
    Object[] pool = new Object[count];
    List<int[]> references = new ArrayList<>();
    for (int i = 1; i < count; ++i) {
      int tag = in.readUnsignedByte();
      switch (tag) {
        case 1 -> pool[i] = in.readUTF();
        case 5, 6 -> {
          in.readLong();
          ++i;
        }
        case 7, 8, 16, 19, 20 -> pool[i] = in.readUnsignedShort();
        case 9, 10, 11, 12, 17, 18 -> {
          int[] pair = {in.readUnsignedShort(), in.readUnsignedShort()};
          pool[i] = pair;
          if (tag == 10) {
            references.add(pair);
          }
        }
        case 15 -> in.skipBytes(3);
        default -> in.skipBytes(4);
      }
    }
    for (int[] reference : references) {
      String owner = (String) pool[(Integer) pool[reference[0]]];
      String method = (String) pool[((int[]) pool[reference[1]])[0]];
      called.add(owner.substring(owner.lastIndexOf('/') + 1) + "." + method);
    }
  }

  @Test
  void everyFunctionIsCalled() throws Exception {
    Set<String> called = called();
    int functions = 0;
    for (String function : functions()) {
      boolean reached =
          function.endsWith("_init")
              ? called.contains(function.replaceAll("_init$", ".<init>"))
              : called.contains("Raw." + function);
      assertTrue(reached || NOT_CALLED.containsKey(function), function + " is not called");
      ++functions;
    }
    assertTrue(functions > 90, functions + " functions");
  }

  @Test
  void everyFieldIsReadOrWritten() throws Exception {
    Set<String> called = called();
    String text = header().replaceAll("(?s)/\\*.*?\\*/", "");
    Set<String> options = new TreeSet<>();
    Set<String> structs = new TreeSet<>();
    int fields = 0;
    for (MatchResult struct : all("^(?:typedef )?struct (ga_\\w+) \\{([^}]*)\\}", text)) {
      String type = struct.group(1);
      structs.add(type);
      if (type.equals("ga_comm_table")) {
        continue;  // functions of a C program
      }
      for (String declaration : struct.group(2).split(";")) {
        if (declaration.isBlank()) {
          continue;
        }
        for (String name : declaration.replaceAll("\\[\\d+\\]", "").trim().split(",")) {
          String field = name.trim().replaceAll(".*[ *]", "");
          if (field.equals("struct_size") || field.startsWith("reserved")) {
            continue;
          }
          ++fields;
          String property = field.substring(0, 1).toUpperCase() + field.substring(1);
          boolean reached =
              called.contains(type + ".get" + property)
                  || called.contains(type + ".set" + property);
          // What the program fills can be filled.
          if (called.contains(type + ".set" + property)) {
            options.add(type);
          }
          String full = type + "." + field;
          assertTrue(reached || NOT_CALLED.containsKey(full), full + " is not reached");
        }
      }
    }
    assertTrue(fields > 120, fields + " fields");
    for (String function : functions()) {
      String struct = function.replaceAll("_init$", "");
      assertTrue(struct.equals(function) || structs.contains(struct), struct + " was not read");
    }
    assertEquals(
        Set.of(
            "ga_bn_options", "ga_clip", "ga_comm_config", "ga_comm_options", "ga_config", "ga_ema", "ga_flat_entry", "ga_loss_scaler",
            "ga_micro_options", "ga_optimizer", "ga_param_options", "ga_schedule",
            "ga_state_options"),
        options);
    for (String method : IN_PLACE) {
      assertTrue(called.contains(method), method + " is not called");
    }
  }

  @Test
  void theListOfExceptionsIsNotStale() throws Exception {
    String text = header();
    for (String name : NOT_CALLED.keySet()) {
      String field = name.substring(name.indexOf('.') + 1);
      assertTrue(
          Pattern.compile("\\b" + field + "\\b").matcher(text).find(),
          name + " is not in the headers");
    }
  }

  @Test
  void everyEnumeratorIsThere() throws Exception {
    String text = header().replaceAll("(?s)/\\*.*?\\*/", "");
    List<Class<?>> enums = new ArrayList<>();
    URI facade = Context.class.getProtectionDomain().getCodeSource().getLocation().toURI();
    try (var files = Files.walk(Path.of(facade).resolve("org/gradaccum"))) {
      for (Path file : files.toList()) {
        String name = file.getFileName().toString();
        if (name.endsWith(".class")) {
          Class<?> type =
              Class.forName(
                  "org.gradaccum." + name.replace(".class", ""),
                  false,
                  getClass().getClassLoader());
          if (type == Status.class || (type.isEnum() && Numbered.class.isAssignableFrom(type))) {
            enums.add(type);
          }
        }
      }
    }
    int groups = 0;
    for (MatchResult group : all("^enum \\{([^}]*)\\}", text)) {
      Map<String, Integer> enumerators = new TreeMap<>();
      for (String item : group.group(1).split(",")) {
        String[] parts = item.split("=");
        enumerators.put(parts[0].trim(), Integer.parseInt(parts[1].trim()));
      }
      if (enumerators.keySet().equals(Set.of("GA_MICRO_LAST"))
          || enumerators.keySet().equals(Set.of("GA_COMM_ID_SIZE"))
          || enumerators.keySet().equals(Set.of("GA_COMM_SUM", "GA_COMM_MAX"))) {
        continue;  // a flag, MicroOptions.last; a size; arguments of functions of a ga_comm_table
      }
      ++groups;
      assertTrue(
          enums.stream().anyMatch(type -> has(type, enumerators)), "no enum has " + enumerators);
    }
    assertTrue(groups > 25, groups + " enums");
  }

  /** Whether a Java enum has these enumerators, with their numbers, and no others. */
  private static boolean has(Class<?> type, Map<String, Integer> enumerators) {
    int found = 0;
    for (Object constant : type.getEnumConstants()) {
      int value =
          constant instanceof Status status ? status.value() : ((Numbered) constant).value();
      String suffix = "_" + ((Enum<?>) constant).name();
      if (constant == Status.UNKNOWN) {
        continue;  // no status of the header
      }
      if (enumerators.entrySet().stream()
          .noneMatch(e -> e.getKey().endsWith(suffix) && e.getValue() == value)) {
        return false;
      }
      ++found;
    }
    return found == enumerators.size();
  }
}

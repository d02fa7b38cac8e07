// SPDX-License-Identifier: Apache-2.0
using System;
using System.Collections.Generic;
using System.IO;
using System.Reflection;
using System.Reflection.Emit;
using System.Text;
using System.Text.RegularExpressions;

namespace GradAccum.Tests {
  /// <summary>
  /// Everything in gradaccum.h and its parts is within reach of a program: the headers are read here, without SWIG, and the
  /// compiled facade is searched for calls of the raw layer.
  /// </summary>
  public sealed class CompletenessTests {
    // What the facade does not call, and why.
    private static readonly Dictionary<string, string> Exceptions = new Dictionary<string, string> {
      {"ga_kept_info.queued", "arrays are not on a device"},
      {"ga_status_name", "GradAccumException calls it in its constructor's arguments"},
      {"ga_config.parallel_for", "its threads are not those of the run time"},
      {"ga_config.parallel_for_user", "belongs to parallel_for"},
      {"ga_config.allocate", "its memory is not that of the run time"},
      {"ga_config.free", "belongs to allocate"},
      {"ga_config.allocator_user", "belongs to allocate"},
      {"ga_micro_options.loss_scale", "an argument of Accumulate and BeginMicroBatch"},
      {"ga_micro_options.flags", "GA_MICRO_LAST is an argument of Accumulate and BeginMicroBatch"},
      {"ga_schedule.table_size", "set with the table"},
      {"ga_optimizer.ns_rows", "set with the table"},
      {"ga_flat_entry.rank", "set with the shape"},
      {"ga_comm_config.kind", "an argument of the constructor"},
      {"ga_comm_config.table", "C programs alone bring a transport of their own"},
    };

    // Fields that are read or written by a method of another name.
    private static readonly Dictionary<string, string> Methods = new Dictionary<string, string> {
      {"ga_optimizer.ns_coefficients", "set_ns_coefficient"},
      {"ga_optimizer.ns_table", "set_ns_table"},
      {"ga_param_info.shape", "dimension"},
      {"ga_flat_entry.name", "SetName"},
      {"ga_flat_entry.shape", "set_shape"},
      {"ga_state_options.note", "SetNote"},
      {"ga_schedule.table", "set_table"},
    };

    private static readonly string[] Results = {
      "ga_window_info", "ga_step_result", "ga_accumulator", "ga_param_info", "ga_bn_info", "ga_state_info", "ga_memory",
      "ga_build", "ga_kept_info"
    };

    private static readonly string Root = Children.Variable("GA_TEST_ROOT");

    private readonly string header = Header();

    private static string Header() {
      StringBuilder text = new StringBuilder();
      foreach (string part in Directory.GetFiles(Root + "/include/gradaccum", "*.h")) text.Append(File.ReadAllText(part));
      return Regex.Replace(text.ToString(), @"/\*.*?\*/", "", RegexOptions.Singleline);
    }

    private static List<string> Symbols() {
      List<string> symbols = new List<string>();
      foreach (string line in File.ReadAllLines(Root + "/tests/abi/symbols.txt")) symbols.Add(line.Split('@')[0]);
      return symbols;
    }

    public void EveryFunction() {
      HashSet<string> called = Called();
      List<string> symbols = Symbols();
      foreach (Match match in Regex.Matches(header, @"GA_API[^;(]*?\b(ga_\w+)\(")) {
        Expect.True(symbols.Contains(match.Groups[1].Value), match.Groups[1].Value + " is not exported");
      }
      int checkedSymbols = 0;
      foreach (string symbol in symbols) {
        if (!symbol.StartsWith("ga_")) continue;
        ++checkedSymbols;
        if (symbol.EndsWith("_init") || Exceptions.ContainsKey(symbol)) continue;
        Expect.True(called.Contains("Raw." + symbol), "the facade does not call " + symbol);
      }
      Expect.True(checkedSymbols > 80, "symbols were found");
    }

    public void EveryField() {
      HashSet<string> called = Called();
      HashSet<string> structs = new HashSet<string>();
      int fields = 0;
      foreach (Match match in Regex.Matches(header, @"struct (ga_\w+) \{(.*?)\n\}", RegexOptions.Singleline)) {
        string type = match.Groups[1].Value;
        structs.Add(type);
        if (type == "ga_comm_table") continue;  // functions of a C program
        foreach (string declaration in match.Groups[2].Value.Split(';')) {
          foreach (string part in declaration.Split(',')) {
            Match name = Regex.Match(part, @"(\w+)\s*(\[\d+\])?\s*$");
            if (!name.Success) continue;
            string field = name.Groups[1].Value;
            string full = type + "." + field;
            if (field == "struct_size" || field.StartsWith("reserved") || Exceptions.ContainsKey(full)) continue;
            ++fields;
            if (type == "ga_step_result" || type == "ga_window_info") {
              Type result = type == "ga_step_result" ? typeof(StepResult) : typeof(Window);
              Expect.True(result.GetProperty(Pascal(field)) != null, full + " has no property " + Pascal(field));
              continue;
            }
            string method;
            if (!Methods.TryGetValue(full, out method)) {
              method = (Array.IndexOf(Results, type) >= 0 ? "get_" : "set_") + field;
            }
            Expect.True(called.Contains(type + "." + method), "the facade does not call " + type + "." + method);
          }
        }
      }
      Expect.True(fields > 120, "only " + fields + " fields were found");
      foreach (string symbol in Symbols()) {
        if (!symbol.EndsWith("_init")) continue;
        string type = symbol.Substring(0, symbol.Length - "_init".Length);
        Expect.True(structs.Contains(type), type + " was not read");
      }
    }

    public void EveryEnumerator() {
      StringBuilder sources = new StringBuilder();
      string[] folders = {Root + "/bindings/csharp/GradAccum",
                          Children.Variable("GA_TEST_GENERATED")};
      foreach (string folder in folders) {
        foreach (string file in Directory.GetFiles(folder, "*.cs")) sources.Append(File.ReadAllText(file));
      }
      HashSet<string> used = new HashSet<string>();
      foreach (Match match in Regex.Matches(sources.ToString(), @"Raw\.(GA_\w+)")) used.Add(match.Groups[1].Value);
      int enumerators = 0;
      foreach (Match list in Regex.Matches(header, @"\benum \{(.*?)\}", RegexOptions.Singleline)) {
        foreach (Match match in Regex.Matches(list.Groups[1].Value, @"\b(GA_\w+) = (\d+)")) {
          string name = match.Groups[1].Value;
          if (name == "GA_COMM_SUM" || name == "GA_COMM_MAX") continue;  // only functions of a ga_comm_table take them
          ++enumerators;
          Expect.True(used.Contains(name), "the facade does not have " + name);
          object value = typeof(Raw).GetField(name).GetRawConstantValue();
          Expect.Equal(int.Parse(match.Groups[2].Value), (int)value, name);
        }
      }
      Expect.True(enumerators > 90, "only " + enumerators + " enumerators were found");
    }

    /// <summary>An exception that is no longer one is a line too many.</summary>
    public void ExceptionsExist() {
      foreach (string name in Exceptions.Keys) {
        string last = name.Substring(name.IndexOf('.') + 1);
        Expect.True(Regex.IsMatch(header, @"\b" + last + @"\b"), "the header has no " + name);
      }
    }

    private static string Pascal(string name) {
      return Regex.Replace(name, "(^|_)([a-z])", match => match.Groups[2].Value.ToUpperInvariant());
    }

    // "Class.method" of the raw layer, for every call in the facade.
    private static HashSet<string> Called() {
      Assembly assembly = typeof(Context).Assembly;
      HashSet<string> called = new HashSet<string>();
      const BindingFlags All = BindingFlags.Public | BindingFlags.NonPublic | BindingFlags.Instance |
                               BindingFlags.Static | BindingFlags.DeclaredOnly;
      foreach (Type type in assembly.GetTypes()) {
        if (IsRaw(type)) continue;
        List<MethodBase> methods = new List<MethodBase>(type.GetMethods(All));
        methods.AddRange(type.GetConstructors(All));
        foreach (MethodBase method in methods) {
          if (method.GetMethodBody() == null) continue;
          foreach (MethodBase target in Targets(method)) {
            if (IsRaw(target.DeclaringType)) called.Add(target.DeclaringType.Name + "." + target.Name);
          }
        }
      }
      Expect.True(called.Count > 100, "calls were found");
      return called;
    }

    private static bool IsRaw(Type type) {
      return type != null && (type.Name.StartsWith("ga_") || type.Name == "Raw" || type.Name == "RawPINVOKE" ||
                              IsRaw(type.DeclaringType));
    }

    private static readonly Dictionary<short, OpCode> Codes = AllCodes();

    private static Dictionary<short, OpCode> AllCodes() {
      Dictionary<short, OpCode> codes = new Dictionary<short, OpCode>();
      foreach (FieldInfo field in typeof(OpCodes).GetFields()) {
        if (field.FieldType != typeof(OpCode)) continue;
        OpCode code = (OpCode)field.GetValue(null);
        codes[code.Value] = code;
      }
      return codes;
    }

    private static List<MethodBase> Targets(MethodBase method) {
      List<MethodBase> targets = new List<MethodBase>();
      byte[] code = method.GetMethodBody().GetILAsByteArray();
      Type[] ofType = method.DeclaringType.IsGenericType ? method.DeclaringType.GetGenericArguments() : null;
      Type[] ofMethod = method.IsGenericMethod ? method.GetGenericArguments() : null;
      for (int at = 0; at < code.Length;) {
        short value = code[at++];
        if (value == 0xfe) value = (short)(0xfe00 | code[at++]);
        OpCode operation = Codes[value];
        switch (operation.OperandType) {
          case OperandType.InlineNone:
            break;
          case OperandType.ShortInlineBrTarget:
          case OperandType.ShortInlineI:
          case OperandType.ShortInlineVar:
            at += 1;
            break;
          case OperandType.InlineVar:
            at += 2;
            break;
          case OperandType.InlineI8:
          case OperandType.InlineR:
            at += 8;
            break;
          case OperandType.InlineSwitch:
            at += 4 + 4 * BitConverter.ToInt32(code, at);
            break;
          case OperandType.InlineMethod:
            targets.Add(method.Module.ResolveMethod(BitConverter.ToInt32(code, at), ofType, ofMethod));
            at += 4;
            break;
          default:
            at += 4;
            break;
        }
      }
      return targets;
    }
  }
}

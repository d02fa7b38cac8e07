/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that starts Python, ends it, and starts it again. The package must do the same each time, although its
 * extension is loaded once. Arguments: a folder with the package.
 */
#include <Python.h>
#include <stdio.h>

static const char program[] =
    "import array, sys\n"
    "sys.path.insert(0, folder)\n"
    "import gradaccum as ga\n"
    "try:\n"
    "    ga.Context().set_accum_steps(-1)\n"
    "    raise SystemExit('no error was raised')\n"
    "except ga.Error as error:\n"
    "    assert 'accum_steps' in str(error), error\n"
    "done = []\n"
    "weight, gradient = array.array('f', [0] * 100000), array.array('f', [1] * 100000)\n"
    "config = ga.Config(\n"
    "    eager=True, eager_threads=1, nonfinite=ga.Nonfinite.IGNORE, on_param_done=done.append\n"
    ")\n"
    "with ga.Context(config) as context:\n"
    "    group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1))\n"
    "    param = context.add_param(group, 'weight', weight)\n"
    "    last = ga.MicroOptions(flags=ga.MicroFlags.LAST)\n"
    "    with context.micro_batch(options=last) as micro:\n"
    "        micro.accumulate(param, gradient)\n"
    "        context.ready(param)\n"
    "    context.step()\n"
    "assert weight[0] == -1, weight[0]\n"
    "assert done == [param], done\n";

int main(int argc, char** argv) {
  int round;
  if (argc != 2) return 2;
  for (round = 0; round < 3; round++) {
    PyObject *folder, *globals;
    Py_Initialize();
    folder = PyUnicode_FromString(argv[1]);
    globals = PyModule_GetDict(PyImport_AddModule("__main__"));
    PyDict_SetItemString(globals, "folder", folder);
    Py_DECREF(folder);
    if (PyRun_SimpleString(program) != 0) {
      printf("round %d failed\n", round);
      return 1;
    }
    if (Py_FinalizeEx() != 0) return 1;
  }
  return 0;
}

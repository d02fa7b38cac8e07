// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <limits>
#include <stdexcept>

#include "../common/console.hpp"
#include "../common/figures.hpp"

// ---- Comparison ---------------------------------------------------------------------------------

std::map<std::int64_t, double> parameter_differences(const Run& a, const Run& b) {
  std::map<std::int64_t, double> differences;
  for (const auto& [step, values] : a.parameters) {
    differences[step] = largest_difference(values, b.parameters.at(step));
  }
  return differences;
}

void print_comparison(const std::vector<Run>& runs) {
  const auto row = [&runs](const char* what, const auto& cell) {
    std::printf("  %-33s", what);
    for (const Run& run : runs) std::printf(" %14s", cell(run).c_str());
    std::printf("\n");
  };
  const auto memory = [&row](const char* what, std::int64_t Summary::*bytes) {
    row(what, [bytes](const Run& run) { return text("%.2f MiB", mib(run.summary.*bytes)); });
  };
  const auto any = [&runs](std::int64_t Summary::*bytes) {
    return runs.front().summary.*bytes > 0;
  };
  std::printf("\n");
  row("", [](const Run& run) { return run.cut.name(); });
  row("test accuracy",
      [](const Run& run) { return text("%.2f %%", 100 * run.epochs.back().test_accuracy); });
  if (any(&Summary::average_bytes)) {
    row("test accuracy of the EMA",
        [](const Run& run) { return text("%.2f %%", 100 * run.epochs.back().average_accuracy); });
  }
  row("loss of the last window", [](const Run& run) { return text("%.6f", run.losses.back()); });
  row("skipped steps", [](const Run& run) { return std::to_string(run.summary.skipped_steps); });
  if (runs.front().summary.loss_scale != 1) {
    row("loss scale at the end", [](const Run& run) { return text("%g", run.summary.loss_scale); });
  }
  row("samples/s", [](const Run& run) {
    return text("%.0f", static_cast<double>(run.summary.samples) / run.summary.seconds);
  });
  row("peak memory of the process",
      [](const Run& run) { return text("%.2f MiB", mib(run.peak_bytes)); });
  memory("  training and test images", &Summary::data_bytes);
  memory("  activations and their gradients", &Summary::activation_bytes);
  memory("  parameters", &Summary::parameter_bytes);
  memory("  libgradaccum: accumulators", &Summary::accumulator_bytes);
  memory("  libgradaccum: optimizer state", &Summary::state_bytes);
  if (any(&Summary::master_bytes)) memory("  libgradaccum: master weights", &Summary::master_bytes);
  if (any(&Summary::average_bytes)) memory("  libgradaccum: EMA", &Summary::average_bytes);
  memory("  libgradaccum: workspace", &Summary::workspace_bytes);

  const Cut& accumulated = runs[1].cut;
  if (accumulated.micro < accumulated.batch) {
    std::printf(
        "\n  Every micro-batch multiplies with all weights, so %s reads them %lld times as often "
        "as %s\n"
        "  does, for the same samples: hence fewer samples a second. GA_VERBOSE=1 shows the time "
        "of each\n"
        "  call of the library.\n",
        accumulated.name().c_str(),
        static_cast<long long>((accumulated.batch + accumulated.micro - 1) / accumulated.micro),
        runs[0].cut.name().c_str());
  }

  std::printf("\n  largest difference of any parameter from the run with whole batches\n");
  for (const auto& [step, values] : runs[0].parameters) {
    std::printf("  after step %-37lld", static_cast<long long>(step));
    for (std::size_t i = 1; i < runs.size(); ++i) {
      std::printf(" %14.3g", parameter_differences(runs[0], runs[i])[step]);
    }
    std::printf("\n");
  }
  if (runs.size() > 2) {
    std::printf(
        "  The control, \"%s\", is the first run with the samples of each batch in reverse order.\n"
        "  Its differences are the effect of rounding alone on this network.\n",
        runs[2].cut.name().c_str());
  }
}

// ---- CSV and picture ----------------------------------------------------------------------------

namespace {

void write_csv(const std::string& path, const std::vector<Run>& runs) {
  std::ofstream csv(path);
  csv << std::setprecision(std::numeric_limits<double>::max_digits10) << "step";
  const char* const names[] = {"full", "accumulated", "control"};
  std::vector<std::map<std::int64_t, double>> differences;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    csv << ",loss_" << names[i] << ",test_accuracy_" << names[i] << ",max_abs_diff_" << names[i];
    differences.push_back(parameter_differences(runs[0], runs[i]));
  }
  csv << '\n';
  std::size_t epoch = 0;
  for (std::size_t window = 0; window < runs[0].losses.size(); ++window) {
    const auto step = static_cast<std::int64_t>(window + 1);
    const bool epoch_ends = runs[0].epochs[epoch].last_step == step;
    csv << step;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      csv << ',' << runs[i].losses[window] << ',';
      if (epoch_ends) csv << runs[i].epochs[epoch].test_accuracy;
      csv << ',';
      if (differences[i].count(step)) csv << differences[i][step];
    }
    csv << '\n';
    epoch += epoch_ends;
  }
  csv.close();
  if (!csv) throw std::runtime_error("cannot write " + path);
}

// Upper plot: the losses of both runs, overlaid, and the test accuracy. Lower plot: the difference
// of the parameters. Losses are means over 1/200 of the run, because single windows are noisy.
constexpr char kPlot[] = R"(
set terminal svg size 900,640 font "sans-serif,13" background "white"
set output "fashion_mnist.svg"
set datafile separator comma
set xrange [0:steps]
set grid lc rgb "#dddddd"
set lmargin 11
set rmargin 10
every_bin(x) = (floor((x - 1) / bin) + 0.5) * bin
set multiplot

set origin 0, 0.38
set size 1, 0.62
set bmargin 0.5
set format x ""
set ylabel "training loss"
set logscale y
set yrange [low:high]
set ytics nomirror (3, 2, 1, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
set y2label "test accuracy, %"
set y2range [60:100]
set y2tics
set key top right
plot csv skip 1 using (every_bin($1)):2 smooth unique lw 6 lc rgb "#9ecae1" \
         title "loss, batches of " . full, \
     csv skip 1 using (every_bin($1)):5 smooth unique lw 1.5 lc rgb "#d7301f" \
         title "loss, micro-batches " . accumulated, \
     csv skip 1 using 1:(100 * $3) axes x1y2 with points pt 6 ps 1.4 lw 2 lc rgb "#3182bd" \
         title "test accuracy, batches of " . full, \
     csv skip 1 using 1:(100 * $6) axes x1y2 with points pt 2 ps 0.8 lw 2 lc rgb "#d7301f" \
         title "test accuracy, micro-batches " . accumulated

set origin 0, 0
set size 1, 0.38
set tmargin 0.5
unset bmargin
set format x "%g"
set xlabel "step"
set ylabel "largest difference\nof a parameter"
unset y2label
unset y2tics
set yrange [1e-9:1]
set ytics (1e-8, 1e-6, 1e-4, 1e-2)
set format y "%.0e"
set key at graph 0.98, 0.3 right
plot csv skip 1 using 1:7 with linespoints pt 7 ps 0.6 lc rgb "#d7301f" \
         title "micro-batches " . accumulated, \
     for [i = 1:controls] csv skip 1 using 1:10 with linespoints pt 6 ps 0.9 lc rgb "#636363" \
         title "control: batches of " . control
unset multiplot
)";

}  // namespace

void write_report(const std::string& folder, const std::vector<Run>& runs) {
  const std::string base = (std::filesystem::path(folder) / "fashion_mnist").string();
  write_csv(base + ".csv", runs);

  const std::size_t bin = std::max<std::size_t>(1, runs[0].losses.size() / 200);
  const auto [low, high] = loss_range(runs[0].losses, bin);
  std::ofstream script(base + ".gp");
  script << "csv = \"fashion_mnist.csv\"\n"
         << "full = \"" << runs[0].cut.name() << "\"\n"
         << "accumulated = \"" << runs[1].cut.name() << "\"\n"
         << "controls = " << runs.size() - 2 << "\n"
         << "control = \"" << runs.back().cut.name() << "\"\n"
         << "steps = " << runs[0].losses.size() << "\n"
         << "bin = " << bin << "\n"
         << "low = " << low << "\n"
         << "high = " << high << "\n"
         << kPlot;
  script.close();
  if (!script) throw std::runtime_error("cannot write " + base + ".gp");

  draw_picture(folder, "fashion_mnist");
}

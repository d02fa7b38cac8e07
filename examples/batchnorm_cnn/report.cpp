// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <limits>
#include <stdexcept>

#include "../common/console.hpp"
#include "../common/figures.hpp"

namespace {

template <typename Cell>
void print_row(const std::string& what, const std::vector<Run>& runs, const Cell& cell) {
  std::printf("  %-35s", what.c_str());
  for (const Run& run : runs) std::printf(" %12s", cell(run).c_str());
  std::printf("\n");
}

// The mean loss of the last epoch.
double mean_loss(const Run& run) {
  const auto first = run.epochs.size() > 1
                         ? static_cast<std::size_t>(run.epochs[run.epochs.size() - 2].last_step)
                         : 0;
  double sum = 0;
  for (std::size_t i = first; i < run.losses.size(); ++i) sum += run.losses[i];
  return sum / static_cast<double>(run.losses.size() - first);
}

}  // namespace

double loss_difference(const std::vector<Run>& runs, const Run& run, std::size_t steps) {
  double largest = 0;
  for (std::size_t i = 0; i < std::min(steps, run.losses.size()); ++i) {
    const double difference = std::abs(run.losses[i] - runs.front().losses[i]);
    if (!(difference <= largest)) largest = difference;  // keeps a NaN too
  }
  return largest;
}

void print_comparison(const std::vector<Run>& runs) {
  const Run& full = runs.front();
  std::printf(
      "\n  one batch   normalised by the statistics of the whole batch\n"
      "  MICRO       each micro-batch by its own statistics, as in most frameworks\n"
      "  CUMULATIVE  each micro-batch by the statistics of those up to it\n"
      "  WINDOW      all micro-batches by the statistics of all of them: exactly the whole batch;\n"
      "              each layer visits all micro-batches before the next layer begins\n\n");
  print_row("", runs, [](const Run& run) { return run.setup.name; });
  print_row("samples per micro-batch", runs,
            [](const Run& run) { return std::to_string(run.setup.micro); });
  print_row("test accuracy", runs,
            [](const Run& run) { return text("%.2f %%", 100 * run.epochs.back().test_accuracy); });
  print_row("mean loss of the last epoch", runs,
            [](const Run& run) { return text("%.6f", mean_loss(run)); });
  print_row("processor time of the training", runs,
            [](const Run& run) { return text("%.1f s", run.seconds); });
  print_row("activations and their gradients", runs,
            [](const Run& run) { return text("%.2f MiB", mib(run.activation_bytes)); });
  print_row("libgradaccum: statistics", runs, [](const Run& run) {
    return text("%.2f KiB", static_cast<double>(run.statistics_bytes) / 1024);
  });

  std::printf("\n  largest difference from the first run\n");
  for (const auto& [step, values] : full.parameters) {
    print_row(text("parameters after step %lld", static_cast<long long>(step)), runs,
              [&, step = step, &values = values](const Run& run) {
                return text("%.2g", largest_difference(run.parameters.at(step), values));
              });
    print_row(text("  losses up to this step"), runs, [&, step = step](const Run& run) {
      return text("%.2g", loss_difference(runs, run, static_cast<std::size_t>(step)));
    });
  }

  std::printf(
      "\n  running variance: relative error, against the exact one of the same data in double\n");
  for (std::size_t i = 0; i < full.variances.size(); ++i) {
    print_row(full.variances[i].name, runs,
              [i](const Run& run) { return text("%.2g", run.variances[i].error); });
  }
  std::printf("  a running mean of the micro-batches' variances, divided by the exact variance\n");
  for (std::size_t i = 0; i < full.variances.size(); ++i) {
    const LayerVariance& layer = runs[1].variances[i];
    print_row(text("%s, from %lld elements each", layer.name.c_str(),
                   static_cast<long long>(layer.count)),
              runs, [i](const Run& run) { return text("%.4f", run.variances[i].averaged); });
  }
  if (runs.size() > 4) {
    std::printf(
        "\n  The control, \"%s\", is the first run with the samples of each batch in reverse "
        "order.\n"
        "  Its differences are the effect of rounding alone on this network.\n",
        runs[4].setup.name.c_str());
  }
}

// ---- CSV and picture ----------------------------------------------------------------------------

namespace {

void write_csv(const std::string& path, const std::vector<Run>& runs) {
  std::ofstream csv(path);
  csv << std::setprecision(std::numeric_limits<double>::max_digits10) << "step";
  for (const Run& run : runs) csv << ",loss " << run.setup.name;
  for (const Run& run : runs) csv << ",test accuracy " << run.setup.name;
  csv << '\n';
  std::size_t epoch = 0;
  for (std::size_t window = 0; window < runs.front().losses.size(); ++window) {
    const bool epoch_ends =
        runs.front().epochs[epoch].last_step == static_cast<std::int64_t>(window + 1);
    csv << window + 1;
    for (const Run& run : runs) csv << ',' << run.losses[window];
    for (const Run& run : runs) {
      csv << ',';
      if (epoch_ends) csv << run.epochs[epoch].test_accuracy;
    }
    csv << '\n';
    epoch += epoch_ends;
  }
  csv.close();
  if (!csv) throw std::runtime_error("cannot write " + path);
}

// Upper plot: the losses, whole batches as a wide line and WINDOW as a thin one on top of it. Lower
// plot: the difference of each loss from that of whole batches. All points are means over 1/200 of
// the run, because single windows are noisy.
constexpr char kPlot[] = R"(
set terminal svg size 900,680 font "sans-serif,13" background "white"
set output "batchnorm_cnn.svg"
set datafile separator comma
set xrange [0:steps]
set grid lc rgb "#dddddd"
set lmargin 11
set rmargin 4
every_bin(x) = (floor((x - 1) / bin) + 0.5) * bin
away(y) = y == 0 ? 1e-9 : abs(y)
set multiplot

set origin 0, 0.45
set size 1, 0.55
set bmargin 0.5
set format x ""
set ylabel "training loss"
set logscale y
set yrange [low:high]
set ytics nomirror (3, 2, 1, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02)
set key top right
plot csv skip 1 using (every_bin($1)):2 smooth unique lw 7 lc rgb "#9ecae1" title full, \
     for [i = 1:words(modes)] csv skip 1 using (every_bin($1)):(column(i + 2)) smooth unique \
         lw 1.5 lc rgb word(colours, i) title word(modes, i) . pieces

set origin 0, 0
set size 1, 0.45
set tmargin 0.5
unset bmargin
set format x "%g"
set xlabel "step"
set ylabel "difference of the loss\nfrom one batch"
set yrange [1e-9:3]
set ytics (1e-8, 1e-6, 1e-4, 1e-2, 1)
set format y "%.0e"
set key bottom right
plot for [i = 1:words(modes)] csv skip 1 using (every_bin($1)):(away(column(i + 2) - $2)) \
         smooth unique lw 1.5 lc rgb word(colours, i) title word(modes, i), \
     for [i = 1:controls] csv skip 1 using (every_bin($1)):(away(column(words(modes) + 3) - $2)) \
         smooth unique lw 1.5 lc rgb "#636363" title "control: one batch, " . control
unset multiplot
)";

}  // namespace

void write_report(const std::string& folder, const std::vector<Run>& runs) {
  const std::string base = (std::filesystem::path(folder) / "batchnorm_cnn").string();
  write_csv(base + ".csv", runs);

  const std::size_t bin = std::max<std::size_t>(1, runs.front().losses.size() / 200);
  double low = std::numeric_limits<double>::infinity(), high = 0;
  for (const Run& run : runs) {
    const auto range = loss_range(run.losses, bin);
    low = std::min(low, range.first);
    high = std::max(high, range.second);
  }
  const Setup& full = runs[0].setup;
  std::ofstream script(base + ".gp");
  script << "csv = \"batchnorm_cnn.csv\"\n"
         << "full = \"one batch of " << full.micro << "\"\n"
         << "modes = \"" << runs[1].setup.name << " " << runs[2].setup.name << " "
         << runs[3].setup.name << "\"\n"
         << "colours = \"#31a354 #756bb1 #d7301f\"\n"
         << "pieces = \", micro-batches of " << runs[1].setup.micro << "\"\n"
         << "controls = " << runs.size() - 4 << "\n"
         << "control = \"" << runs.back().setup.name << "\"\n"
         << "steps = " << runs[0].losses.size() << "\n"
         << "bin = " << bin << "\n"
         << "low = " << low << "\n"
         << "high = " << high << "\n"
         << kPlot;
  script.close();
  if (!script) throw std::runtime_error("cannot write " + base + ".gp");
  draw_picture(folder, "batchnorm_cnn");
}

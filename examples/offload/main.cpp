// Trains a model of a transformer's shapes twice: with ga_step after backward, and with updates that go on
// while backward runs, on a core of their own (ga_config.eager). Compares the parameters bit for bit, and
// draws when gradients arrive and when parameters are done. The model stands for what a device computes:
// one core delivers the gradients layer by layer, in the time that a backward pass is said to take.
//
//   offload --out FOLDER
//
// The last lines say how much of the time of ga_step eager updates hide, and whether the bits are equal. Exits
// with 1 if they differ.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/figures.hpp"
#include "gradaccum/gradaccum.h"
#include "train.hpp"

namespace {

struct Options {
  int blocks = 12, width = 576, windows = 24;
  double backward = 0;  // ms; 0: measured
  double clip = 2, lr = 0.004;
  std::string out = "examples/out";
};

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Trains a model of a transformer's shapes with ga_step after backward and with updates while "
      "backward runs, and compares times and bits."};
  app.get_formatter()->column_width(28);
  app.add_option("--backward", options.backward,
                 "Milliseconds of a backward pass; default: 1.5 times those of ga_step on one core")
      ->check(CLI::Range(0.0, 60000.0));
  app.add_option(
         "--clip", options.clip,
         "Largest global norm, where the first gradient has norm 1; a clipped step computes "
         "its updates twice. 0: neither clip nor check, and update in place")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--lr", options.lr, "Learning rate")->capture_default_str();
  app.add_option("--windows", options.windows, "Steps of each training")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--blocks", options.blocks, "Transformer blocks")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--width", options.width, "Width of the transformer")
      ->check(CLI::Range(1, 16384))
      ->capture_default_str();
  app.add_option("--out", options.out, "Folder for the CSV and the picture")
      ->take_last()
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return options;
}

// The window of the median time that is left after the last gradient.
const Window& typical(const std::vector<Window>& windows) {
  std::vector<const Window*> sorted;
  for (const Window& w : windows) sorted.push_back(&w);
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end(),
                   [](const Window* a, const Window* b) { return a->left() < b->left(); });
  return **middle;
}

// left: seconds from the last gradient to the end of a step after backward.
void print_summary(double left, const std::vector<Window>& eager) {
  const double after = typical(eager).left(), windows = static_cast<double>(eager.size());
  double ahead = 0, redone = 0;
  for (const Window& w : eager) {
    ahead += static_cast<double>(w.ahead);
    redone += static_cast<double>(w.redone);
  }
  std::printf(
      "After backward a step takes %.1f ms. With updates while backward runs, %.1f ms of it are "
      "left after\n"
      "the last gradient: %.0f %% are hidden (medians). In a window, %.0f of %lld parameters are "
      "computed before\n"
      "ga_step, %.1f of them twice. ",
      1e3 * left, 1e3 * after, 100 * (1 - after / left), ahead / windows,
      static_cast<long long>(eager.front().tensors), redone / windows);
  if (std::isnan(eager.front().norm))
    std::printf("Each may be read as soon as it is updated.\n");
  else
    std::printf("All may be read when ga_step has decided that the window is applied.\n");
}

std::string norm_text(double norm) {  // NaN if nothing has measured it
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.4f", norm);
  return std::isnan(norm) ? "-" : buffer;
}

void print_windows(const std::vector<Window>& apart, const std::vector<Window>& eager) {
  std::printf(
      "loss: half the squared distance of the parameters from a target, scaled\n"
      "ahead: parameters whose update was computed before ga_step; redone: computed twice\n\n"
      "                              ms from the last gradient to the end     parameters\n"
      "window        loss      norm     after backward             eager     ahead    redone\n");
  for (std::size_t i = 0; i < apart.size(); ++i)
    std::printf("%6zu  %10.4f  %8s  %17.1f  %16.1f  %8lld  %8lld\n", i + 1, eager[i].loss,
                norm_text(eager[i].norm).c_str(), 1e3 * apart[i].left(), 1e3 * eager[i].left(),
                static_cast<long long>(eager[i].ahead), static_cast<long long>(eager[i].redone));
}

// One plot of a window: a row for each layer. columns: of the times in the CSV.
void write_plot(std::ostream& gp, const std::string& title, const Window& window,
                const char* columns[2]) {
  const double last = 1e3 * window.last, end = 1e3 * window.end;
  gp << "set title \"" << title << ": ga_step returns " << std::lround(end - last)
     << " ms after the last gradient";
  if (window.ahead > 0)
    gp << ";\\n"
       << window.ahead << " of " << window.tensors << " parameters were computed before it";
  gp << "\"\n"
     << "set object 1 rectangle from " << last << ", graph 0 to " << end
     << ", graph 1 fillcolor '#f6d5d5' fillstyle solid noborder behind\n"
     << "plot csv using " << columns[0] << ":1:("
     << "$" << columns[1] << "-$" << columns[0]
     << "):(0) with vectors nohead linecolor '#c0c0c0' notitle, \\\n"
     << "  csv using " << columns[0]
     << ":1 with points pointtype 7 linecolor '#1f77b4' title 'gradient arrives', \\\n"
     << "  csv using " << columns[1]
     << ":1 with points pointtype 5 linecolor '#d62728' title 'parameters may be read'\n";
}

void write_picture(const std::string& folder, const Model& model, const Window& apart,
                   const Window& eager) {
  std::ofstream csv(folder + "/offload.csv"), gp(folder + "/offload.gp");
  csv << "layer,name,arrives after backward,done after backward,arrives eager,done eager\n";
  std::string tics;
  for (std::size_t k = 0; k < model.layers().size(); ++k) {
    const std::string& name = model.layers()[k].name;
    csv << k << ',' << name << ',' << 1e3 * apart.arrived[k] << ',' << 1e3 * apart.done[k] << ','
        << 1e3 * eager.arrived[k] << ',' << 1e3 * eager.done[k] << '\n';
    if (model.layers().size() <= 40) tics += (k ? ", '" : "'") + name + "' " + std::to_string(k);
  }
  gp << "csv = 'offload.csv'\nset terminal svg noenhanced size 720,760 background 'white'\n"
        "set output 'offload.svg'\nset datafile separator ','\nset multiplot layout 2,1\n"
        "set xlabel 'ms since backward began'\nset grid xtics\nset tics nomirror\n"
        "set key bottom left Left reverse samplen 1\n"
     << "set xrange [0:" << 1.02e3 * std::max(apart.end, eager.end)
     << "]\nset yrange [-0.7:" << static_cast<double>(model.layers().size()) - 0.3 << "]\n";
  if (!tics.empty()) gp << "set ytics (" << tics << ")\n";
  const char* columns[2][2] = {{"3", "4"}, {"5", "6"}};
  write_plot(gp, "Step after backward", apart, columns[0]);
  write_plot(gp, "Updates while backward runs (eager)", eager, columns[1]);
  gp << "unset multiplot\n";
  csv.close();
  gp.close();
  if (!csv || !gp) throw std::runtime_error("the picture could not be written to " + folder);
  draw_picture(folder, "offload", "times");
}

}  // namespace

int main(int argc, char** argv) try {
  const Options options = parse(argc, argv);
  std::filesystem::create_directories(options.out);  // before the training, because it may fail
  const Model model(options.blocks, options.width);
  std::printf("%s\n%zu parameters in %zu tensors\n", ga_build_info(), model.size(),
              model.tensors().size());

  Way way;
  way.clip = options.clip;
  way.lr = options.lr;
  way.backward = options.backward / 1e3;
  if (way.backward <= 0) {
    std::vector<std::uint16_t> p(model.size());
    way.threads = 1;
    const double step = typical(train(model, way, 5, p)).left();
    std::printf("ga_step takes %.1f ms on one core\n", 1e3 * step);
    way.backward = 1.5 * step;
    way.threads = 0;
  }
  std::printf("backward takes %.1f ms on one core\n\n", 1e3 * way.backward);
  std::fflush(stdout);

  std::vector<std::uint16_t> p(model.size()), q(model.size());
  const std::vector<Window> apart = train(model, way, options.windows, p);
  way.eager = true;
  const std::vector<Window> eager = train(model, way, options.windows, q);
  print_windows(apart, eager);
  write_picture(options.out, model, typical(apart), typical(eager));

  print_summary(typical(apart).left(), eager);
  std::printf("The parameters have %s bits.\n", p == q ? "equal" : "different");
  return p == q ? EXIT_SUCCESS : EXIT_FAILURE;
} catch (const std::exception& error) {
  std::fprintf(stderr, "offload: %s\n", error.what());
  return EXIT_FAILURE;
}

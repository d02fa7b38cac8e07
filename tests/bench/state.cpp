// SPDX-License-Identifier: Apache-2.0
//
// S1-S3: saving and loading state on disk, against writing and reading as many bytes, and the memory that
// they take. In the folder that TMPDIR names, or in /tmp.
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "program.hpp"

namespace bench {
namespace {

constexpr size_t kPiece = size_t{1} << 20;

void require(bool right, const char* what) {
  if (!right) throw std::runtime_error(std::string(what) + " failed");
}

// Bytes of this process that are resident now.
int64_t resident() {
  FILE* const file = fopen("/proc/self/statm", "r");
  long long all = 0, pages = 0;
  require(file && fscanf(file, "%lld %lld", &all, &pages) == 2, "reading /proc/self/statm");
  fclose(file);
  return pages * sysconf(_SC_PAGESIZE);
}

// Writes as many bytes of the block as wanted, over and over if it has fewer, and syncs the file.
void write_plain(const std::string& path, const Block& block, int64_t n, size_t bytes) {
  const int file = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  require(file >= 0, "opening a file");
  const auto* const data = reinterpret_cast<const char*>(block.get());
  const size_t most = static_cast<size_t>(n) * sizeof(float) / kPiece;
  for (size_t done = 0; done < bytes; done += kPiece) {
    const size_t size = std::min(kPiece, bytes - done);
    const char* const from = data + done / kPiece % most * kPiece;
    require(write(file, from, size) == static_cast<ssize_t>(size), "writing a file");
  }
  require(fsync(file) == 0 && close(file) == 0, "syncing a file");
}

void read_plain(const std::string& path, std::vector<char>& buffer) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  require(file >= 0, "opening a file");
  ssize_t got;
  while ((got = read(file, buffer.data(), buffer.size())) > 0) continue;
  require(got == 0 && close(file) == 0, "reading a file");
}

}  // namespace

void state_figures(const Options& options, Report& report, const Place& place) {
  const Layout& layout = place.layout;
  const Block p = make_block(layout.n, 0, options.threads),
              g = make_block(layout.n, 1, options.threads);
  Setting setting;
  setting.threads = options.threads;
  Context context(layout, p.get(), setting);
  context.accumulate(layout.pointers(g.get()));
  context.step();
  size_t bytes = 0;
  check(ga_save_to_memory(context.get(), nullptr, nullptr, 0, &bytes));
  const char* const folder = getenv("TMPDIR");
  const std::string base =
      std::string(folder ? folder : "/tmp") + "/gradaccum_bench_" + std::to_string(getpid());
  const std::string saved = base + ".safetensors", plain = base + ".plain";
  std::vector<char> buffer(kPiece);
  const int64_t before = resident();
  int64_t most = before;
  const auto save = [&] { check(ga_save(context.get(), saved.c_str(), nullptr)); };
  const auto load = [&] { check(ga_load(context.get(), saved.c_str(), nullptr)); };
  const std::vector<Times> writes = race(
      options.rounds(), 1, {{[&] { write_plain(plain, p, layout.n, bytes); }, {}}, {save, {}}});
  most = std::max(most, resident());
  const std::vector<Times> reads =
      race(options.rounds(), 1, {{[&] { read_plain(saved, buffer); }, {}}, {load, {}}});
  most = std::max(most, resident());
  unlink(saved.c_str());
  unlink(plain.c_str());
  const double megabytes = 1e-6 * static_cast<double>(bytes);
  report.figure("S1", writes[0] / writes[1], Sense::kAtLeast, 0.8,
                format("ga_save %.0f, plain write and fsync %.0f MB/s, of %.0f MB",
                       megabytes / median(writes[1]), megabytes / median(writes[0]), megabytes));
  report.figure("S2", reads[0] / reads[1], Sense::kAtLeast, 0.3,
                format("ga_load, which reads twice, %.0f, plain reading %.0f MB/s",
                       megabytes / median(reads[1]), megabytes / median(reads[0])));
  report.figure("S3", Times{0x1p-20 * static_cast<double>(most - before)}, Sense::kAtMost, 64,
                "MiB resident beyond the context after saves and loads");
}

}  // namespace bench
